"""The search for contexts does a bounded amount of work, whatever was rendered and is searched."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock
from ctxreuse.adapters import context_search
from ctxreuse.adapters.context_search import Piece, _FoundContexts
from ctxreuse.adapters.prompt_draft import PromptPart, ScopedPrompt
from ctxreuse.adapters.prompt_planner import PromptPlanner
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.rendering import Templates


def rendered(*texts: str, templates: Templates | None = None) -> ContextRegistry:
    registry = ContextRegistry()
    for text in texts:
        block = ContextBlock(id=0, text=text)
        registry.render([block], *([] if templates is None else [templates]))
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
    templates = Templates(label="{ordinal}", block="{label}{text}", separator="")
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
                registry.render([ContextBlock(text=text)])
            shown = [f"{around}[Doc_1] {text}{around}" for text in [*texts, *others]]
            return [list(registry.parse(text).pieces) for text in [*shown, "\n".join(shown)]]

    assert parsed(0) == parsed(64)


def test_a_search_needs_no_lock():
    registry = rendered("some text")
    with ThreadPoolExecutor(1) as pool, registry._lock:
        parsed = pool.submit(registry.parse, "[Doc_1] some text").result(timeout=10)
    assert len(parsed.pieces) == 1


@given(
    st.lists(st.text("ab[Doc_1] ", max_size=12), max_size=30), st.text("ab[Doc_1] ", max_size=60)
)
def test_many_kinds_of_openings_are_found_like_few(texts, around):
    templates = Templates(label="{ordinal}", block="{label}{text}")
    registry = rendered(*texts, templates=templates)
    context = registry.render([ContextBlock(text="zz zz zz zz")], templates)
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
