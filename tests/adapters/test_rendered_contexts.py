import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import contexts_in
from hypothesis import assume, given
from hypothesis import strategies as st

from ctxreuse import ContextBlock
from ctxreuse.adapters import context_search, rendered_contexts
from ctxreuse.adapters.context_search import FoundContext, Piece, _FoundContexts
from ctxreuse.adapters.prompt_draft import PromptPart, ScopedPrompt
from ctxreuse.adapters.prompt_planner import PromptPlanner
from ctxreuse.adapters.rendered_contexts import (
    ContextRegistry,
    RegistryStatistics,
    Sighting,
    context_registry,
)
from ctxreuse.context.blocks import text_digest
from ctxreuse.context.lru_map import PartSize
from ctxreuse.context.rendering import Templates

TEMPLATES = Templates(label="[Doc_{id}]")


def blocks(*texts: str) -> list[ContextBlock]:
    return [ContextBlock(id=text[:10], text=text) for text in texts]


def found_texts(found: Sequence[FoundContext]) -> list[list[str]]:
    return [[block.text for block in one.blocks] for one in found]


def test_a_rendering_shows_labels_and_texts_once_and_is_counted_once():
    assert ContextRegistry().render(blocks("first", "second")) == "[CYWI] first\n\n[BSNN] second"
    assert ContextRegistry().render(blocks(*"aba"), TEMPLATES) == "[Doc_a] a\n\n[Doc_b] b"
    registry = ContextRegistry()
    assert registry.render(blocks("a", "b")) == registry.render(blocks("a", "b"))
    assert len(registry) == 1
    assert registry.statistics().spans == 2

    registry = ContextRegistry()
    assert registry.render([]) == ""
    assert len(registry) == 0
    assert registry.parse("").pieces == ()
    assert registry.parse("anything").pieces == ("anything",)


def test_a_rendering_is_found_with_its_blocks_and_their_ids_types():
    registry = ContextRegistry()
    context = registry.render([ContextBlock(id=7, text="seven", tokens=3), *blocks("eight")])
    before, found, behind = registry.parse(f"Read: {context}! Which?").pieces
    assert (before, behind) == ("Read: ", "! Which?")
    assert isinstance(found, FoundContext)
    assert found.text == context
    assert found.blocks == (ContextBlock(id=7, text="seven", tokens=3), *blocks("eight"))

    [found] = contexts_in(
        registry.render([ContextBlock(id=1, text="x"), ContextBlock(id="1", text="x")]), registry
    )
    assert [block.id for block in found.blocks] == [1, "1"]
    assert [type(block.id) for block in found.blocks] == [int, str]


@given(
    st.lists(st.tuples(st.text() | st.integers(), st.text(max_size=9)), min_size=1, max_size=5),
    st.sampled_from(["{label} {text}", "<d {label}>{text}</d>", "{label}{text}"]),
)
def test_blocks_come_back_with_the_identity_that_they_had(given_blocks, words):
    rendered = [ContextBlock(id=one, text=text) for one, text in given_blocks]
    assume(any(block.text.strip() for block in rendered))
    registry = ContextRegistry()
    [found] = registry.parse(registry.render(rendered, Templates(block=words))).pieces
    assert isinstance(found, FoundContext)
    unique = {block.key: block for block in reversed(rendered)}
    assert {block.key: block for block in found.blocks} == unique
    assert all(block.digest == text_digest(block.text) for block in found.blocks)


def test_what_is_not_rendered_whole_is_not_found():
    registry = ContextRegistry()
    context = registry.render(blocks("first", "second"), TEMPLATES)
    assert contexts_in("[Doc_first] first\n\n[Doc_second] other", registry) == []
    assert contexts_in(context[:-1], registry) == []
    assert contexts_in(context.replace(" first", " First"), registry) == []


@pytest.mark.parametrize("label", [Templates.label, TEMPLATES.label, "{id}:"])
def test_a_context_ends_before_words_and_before_another_context_but_not_before_a_block(label):
    registry, templates = ContextRegistry(), Templates(label=label)
    short, other = (
        registry.render(blocks(*"ab"), templates),
        registry.render(blocks("c"), templates),
    )
    for behind in ("Question: which?", other):
        found = contexts_in(f"{short}\n\n{behind}", registry)
        assert found_texts(found)[0] == ["a", "b"]
    longer = ContextRegistry().render(blocks(*"abd"), templates)
    assert len(contexts_in(longer, registry)) == (label == "{id}:"), (
        "where any words may be a label"
    )


def test_contexts_are_found_from_left_to_right_and_the_longest_counts():
    registry = ContextRegistry()
    one, other = registry.render(blocks("a", "b")), registry.render(blocks("c"))
    found = contexts_in(f"{other} and {one} and {other}", registry)
    assert found_texts(found) == [["c"], ["a", "b"], ["c"]]
    assert [each.text for each in found] == [other, one, other]
    registry.render(blocks("a"))
    both = registry.render(blocks("a", "b"))
    assert found_texts(contexts_in(both, registry)) == [["a", "b"]]


def test_contexts_inside_documents_and_openings_that_overlap_are_looked_at():
    registry = ContextRegistry()
    inside = registry.render(blocks("a", "b"))
    outside = registry.render(blocks("first", f"quotes {inside} whole"))
    assert found_texts(contexts_in(outside, registry)) == [["first", f"quotes {inside} whole"]]

    registry = ContextRegistry()
    registry.render(blocks("x"))
    context = registry.render(blocks("y" * 20), Templates(label="x] {id}"))
    assert context.startswith("x] yyy")
    assert found_texts(contexts_in(f"[Doc_{context}", registry)) == [["y" * 20]]


def test_other_templates_and_lone_surrogates_are_found_too():
    registry = ContextRegistry()
    short = Templates(label="{id}", block="{label}) {text};", separator=" ")
    context = registry.render(blocks("a", "", "c" * 100), short)
    assert context == f"a) a; ) ; cccccccccc) {'c' * 100};"
    assert found_texts(contexts_in(f"..{context}..", registry)) == [["a", "", "c" * 100]]
    context = registry.render(blocks("\ud800", "b"))
    assert found_texts(contexts_in(f"\udfff{context}", registry)) == [["\ud800", "b"]]


@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=4),
    before=st.text(max_size=20),
    behind=st.text(max_size=20),
)
def test_whatever_was_rendered_is_found_again(texts, before, behind):
    registry = ContextRegistry()
    given_blocks = [ContextBlock(id=n, text=text) for n, text in enumerate(texts)]
    context = registry.render(given_blocks)
    assume("".join(texts).strip() and not re.match(r"\w", behind))
    pieces = registry.parse(before + context + behind).pieces
    texts = [one if isinstance(one, str) else one.text for one in pieces]
    at = {len("".join(texts[:number])): piece for number, piece in enumerate(pieces)}
    found = at[len(before)]
    assert isinstance(found, FoundContext)
    assert found.blocks == tuple(given_blocks)


def test_a_planned_text_is_one_without_blocks_and_hides_what_stands_in_it():
    registry = ContextRegistry()
    planned = "[Doc_1] a\n\n[Doc_2] b\n\nRead [Doc_2] first."
    registry.remember_planned(planned)
    registry.remember_planned("")
    found = FoundContext(planned, text_digest(planned), ())
    assert registry.parse(f"- {planned} -").pieces == ("- ", found, " -")

    registry = ContextRegistry()
    context = registry.render(blocks("a", "b"))
    registry.remember_planned(f"{context}\n\nRead [Doc_2] first.")
    assert found_texts(contexts_in(f"{context}\n\nRead [Doc_2] first.", registry)) == [[]]
    assert found_texts(contexts_in(f"{context}\n\nWhich?", registry)) == [["a", "b"]]
    registry = ContextRegistry()
    posing = registry.render(blocks("a", "b"))
    registry.remember_planned(f"[Doc_1] quotes {posing}\n\n[Doc_2] c")
    assert found_texts(contexts_in(f"[Doc_1] quotes {posing}\n\n[Doc_2] c", registry)) == [[]]


def test_the_least_recently_seen_is_forgotten_first():
    registry = ContextRegistry(max_renderings=2)
    first = registry.render(blocks("first"))
    second = registry.render(blocks("second"))
    registry.claim("", [Sighting(contexts_in(first, registry)[0], b"somewhere", 0, "new")])
    third = registry.render(blocks("third"))
    assert len(registry) == 2
    assert found_texts(contexts_in(first + second + third, registry)) == [["first"], ["third"]]


def test_contexts_of_many_blocks_count_by_their_blocks():
    registry = ContextRegistry(max_spans=5)
    first = registry.render(blocks("a", "b", "c"))
    second = registry.render(blocks("d", "e", "f"))
    assert found_texts(contexts_in(first + second, registry)) == [["d", "e", "f"]]
    huge = registry.render(blocks(*"abcdefgh"))
    assert found_texts(contexts_in(huge, registry)) == [list("abcdefgh")], (
        "the latest is always kept"
    )
    assert len(registry) == 1


def test_what_is_forgotten_leaves_nothing_behind():
    registry = ContextRegistry(max_renderings=3)
    for number in range(50):
        registry.render(blocks(f"text {number}" * (number % 9), str(number)))
    assert len(registry) == 3
    index = registry._indexes[""]
    assert len(index) == len(index.unmet) == index._openings.total() == 3
    assert sum(len(same.by_length) for same in index._by_head.values()) == 3
    assert registry.statistics() == RegistryStatistics(
        tenants=1, renderings=3, spans=6, places=0, forgotten=47
    )


def test_what_is_remembered_stands_beside_its_bounds_and_a_long_id_counts_by_its_length():
    registry = ContextRegistry(max_renderings=3, max_spans=10)
    registry.render([ContextBlock(id="x" * 64 * 3, text="text")])
    assert registry.statistics().parts == {
        "renderings": PartSize(1, 3),
        "spans": PartSize(4, 10),
        "places": PartSize(0, 100_000),
    }
    for number in range(20):
        registry.render([ContextBlock(id=f"{number}" * 64 * 3, text="other")], tenant="loud")
        assert registry.statistics().spans <= 10
    assert len(contexts_in(registry.render(blocks("kept"), tenant="quiet"), registry, "quiet")) == 1
    registry.render([ContextBlock(id="y" * 64 * 9, text="other")], tenant="loud")
    assert registry._renderings.of("quiet"), "who has no more than a share loses nothing"


def test_threads_may_render_and_find_at_the_same_time():
    registry = ContextRegistry(max_renderings=50)

    def render_and_find(name: int) -> int:
        for number in range(50):
            context = registry.render(blocks(f"{name} {number}", "x"))
            if contexts_in(f"- {context} -", registry):
                continue
            assert len(registry) == 50, "only a full memory forgets"
        return name

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(render_and_find, range(8))) == list(range(8))


def test_a_process_shares_one_registry():
    with ThreadPoolExecutor(8) as pool:
        [shared] = set(pool.map(lambda _: context_registry(), range(20)))
    assert context_registry(None) is shared
    own = ContextRegistry()
    assert context_registry(own) is own
    context = own.render(blocks("only in the own one"))
    assert contexts_in(context, shared) == []


def test_a_batch_of_eleven_thousand_is_remembered_whole():
    registry = ContextRegistry()
    texts = [
        registry.render([ContextBlock(id=number, text=f"text {number}")])
        for number in range(11_000)
    ]
    assert all(contexts_in(text, registry) for text in (texts[0], texts[5_000], texts[-1]))
    assert registry.statistics().forgotten == 0


def test_what_is_forgotten_before_a_prompt_has_shown_it_is_counted_and_logged_once(caplog):
    rendered_contexts._log_forgotten.cache_clear()
    registry = ContextRegistry(max_renderings=3)
    for number in range(5):
        registry.render([ContextBlock(id=number, text=f"text {number}")], TEMPLATES)
    assert registry.statistics().forgotten == 2
    [record] = caplog.records
    assert "max_renderings" in record.getMessage()
    assert "text 0" not in record.getMessage()
    prompts = PromptPlanner(registry=registry)
    for number in (2, 3, 4):
        context = f"[Doc_{number}] text {number}"
        prompts.plan([ScopedPrompt((PromptPart("user", context),))])
    for number in range(5, 8):
        registry.render([ContextBlock(id=number, text=f"text {number}")])
    assert registry.statistics().forgotten == 2, "prompts have shown those"


def rendered(*texts: str, templates: Templates = TEMPLATES) -> ContextRegistry:
    registry = ContextRegistry()
    for text in texts:
        registry.render([ContextBlock(id=1, text=text)], templates)
    return registry


def same_ending(size: int) -> tuple[ContextRegistry, str]:
    """A text at whose every step a context seems to begin, which differs in its middle."""
    unit = "[Doc_1] " + "u" * 56
    middle = size // 256
    text = unit * middle + unit[:-1] + "x" + unit * middle
    return rendered(text.removeprefix("[Doc_1] ")), unit * (size // 64)


def many_with_one_head(size: int) -> tuple[ContextRegistry, str]:
    head = "h" * 64
    texts = [head + "i" * number for number in range(1, size // 8)]
    return rendered(*texts), f"[Doc_1] {head}" * (size // 72)


def nested(size: int) -> tuple[ContextRegistry, str]:
    texts = ["a" * length for length in range(100, size, 100)]
    return rendered(*texts), ("[Doc_1] " + "a" * (size // 2)) * 2


def without_labels(size: int) -> tuple[ContextRegistry, str]:
    templates = Templates(label="{id}", block="{label}{text}", separator="")
    texts = [f"{number}" + "a" * number for number in range(size // 50)]
    return rendered(*texts, templates=templates), "a" * size


class Work:
    """How much a search does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hashed = self.compared = 0
        encoded, candidates = context_search.encoded, _FoundContexts._candidates

        def counting(text: str) -> bytes:
            self.hashed += len(text)
            return encoded(text)

        def noting(*arguments: object) -> object:
            found = candidates(*arguments)
            self.compared += len(found)
            return found

        monkeypatch.setattr(context_search, "encoded", counting)
        monkeypatch.setattr(_FoundContexts, "_candidates", noting)


@pytest.mark.parametrize("case", [same_ending, many_with_one_head, nested, without_labels])
@pytest.mark.parametrize("size", [4_000, 32_000])
def test_the_work_is_linear_in_the_text(case, size, monkeypatch):
    registry, text = case(size)
    work = Work(monkeypatch)
    pieces = registry.parse(text).pieces
    assert "".join(one if isinstance(one, str) else one.text for one in pieces) == text
    assert work.hashed <= 8 * len(text)
    assert work.compared <= 2 * (len(text) // 4 + 20_000)


def test_a_text_that_takes_too_much_work_is_plain_and_counted():
    registry, text = same_ending(32_000)
    parsed = registry.parse(text)
    assert parsed.pieces == (text,)
    assert not parsed.is_searched
    planner = PromptPlanner(registry=registry)
    [planned] = planner.plan([ScopedPrompt((PromptPart("user", text),))])
    assert planned.texts == (text,)
    assert planner.statistics().too_long == 1


def test_what_a_text_that_was_not_searched_may_show_is_not_planned_later():
    registry, text = same_ending(32_000)
    context = registry.render([ContextBlock(text="first"), ContextBlock(text="second")])
    registry.parse(f"{text} {context}")
    planner = PromptPlanner(registry=registry)
    [planned] = planner.plan([ScopedPrompt((PromptPart("user", f"Why {context}?"),))])
    assert planned.plans == ()
    assert planner.statistics().left_alone == 1


def test_a_popular_first_document_does_not_hide_the_others():
    registry = ContextRegistry()
    first = ContextBlock(text="popular " * 50)
    contexts = [
        registry.render([first, ContextBlock(text=f"{'x' * (number % 90)}{number}")])
        for number in range(5_000)
    ]
    for context in contexts[::500]:
        [found, _] = registry.parse(f"{context}\n\nWhich?").pieces
        assert not isinstance(found, str)
        assert found.text == context


def test_one_of_many_that_begin_alike_is_found_by_how_it_ends(monkeypatch):
    registry = ContextRegistry()
    first = ContextBlock(text="popular " * 50)
    contexts = [
        registry.render([first, ContextBlock(text=f"{'x ' * number}{number}")])
        for number in range(2_000)
    ]
    work = Work(monkeypatch)
    for context in contexts[::100]:
        [found, _] = registry.parse(f"{context}\n\nWhich?").pieces
        assert not isinstance(found, str)
        assert found.text == context
    assert work.compared <= 20 * 3


letters = st.text("ab \ud800\U0001f600", max_size=12)


@given(st.lists(letters, max_size=30), st.lists(letters, max_size=20), letters)
def test_many_lengths_are_found_like_few(texts, others, around):
    def parsed(few: int) -> list[list[Piece]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(context_search, "_FEW_LENGTHS", few)
            registry = ContextRegistry(max_renderings=20)
            for text in [*texts, *others]:
                registry.render([ContextBlock(id=1, text=text)], TEMPLATES)
            shown = [f"{around}[Doc_1] {text}{around}" for text in [*texts, *others]]
            return [list(registry.parse(text).pieces) for text in [*shown, "\n".join(shown)]]

    assert parsed(0) == parsed(64)


def test_a_search_needs_no_lock_and_keeps_no_texts():
    registry = rendered("some text")
    with ThreadPoolExecutor(1) as pool, registry._lock:
        parsed = pool.submit(registry.parse, "[Doc_1] some text").result(timeout=10)
    assert len(parsed.pieces) == 1
    registry = ContextRegistry()
    registry.render(blocks("public " * 20 + "a secret"))
    assert "secret" not in repr(vars(registry))


@given(
    st.lists(st.text("ab[Doc_1] ", max_size=12), max_size=30), st.text("ab[Doc_1] ", max_size=60)
)
def test_many_kinds_of_openings_are_found_like_few(texts, around):
    templates = Templates(label="{id}", block="{label}{text}")
    registry = rendered(*texts, templates=templates)
    context = registry.render([ContextBlock(id=1, text="zz zz zz zz")], templates)
    found = registry.parse(f"{around}\n{context}\n{around}").pieces
    assert context in [one.text for one in found if not isinstance(one, str)]


def test_a_prompt_of_very_many_contexts_is_sent_as_given():
    registry = ContextRegistry()
    planner = PromptPlanner(registry=registry)
    for number, planned_contexts in ((64, 64), (65, 0)):
        contexts = [
            registry.render([ContextBlock(text=f"{number}-{one}")]) for one in range(number)
        ]
        prompt = ScopedPrompt((PromptPart("user", "\n".join(contexts)),))
        [planned] = planner.plan([prompt])
        assert len(planned.plans) == planned_contexts
    assert planned.texts == ("\n".join(contexts),)
    assert planner.statistics().too_long == 1
