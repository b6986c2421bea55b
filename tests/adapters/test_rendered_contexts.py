from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock
from ctxreuse.adapters.rendered_contexts import FoundContext, Renderings
from ctxreuse.context.blocks import text_digest
from ctxreuse.context.templates import Templates


def blocks(*texts: str) -> list[ContextBlock]:
    return [ContextBlock(id=f"id-{text[:10]}", text=text) for text in texts]


def found_texts(found: Sequence[FoundContext]) -> list[list[str]]:
    return [[block.text for block in one.blocks] for one in found]


def test_a_rendering_shows_labels_and_texts() -> None:
    assert Renderings().render(blocks("first", "second")) == "[Doc_1] first\n\n[Doc_2] second"


def test_a_rendering_is_found_in_a_prompt_with_its_blocks() -> None:
    renderings = Renderings()
    context = renderings.render([ContextBlock(id=7, text="seven", tokens=3), *blocks("eight")])
    [found] = renderings.find(f"Read: {context}! Which?")
    assert (found.start, found.end) == (6, 6 + len(context))
    assert found.blocks == (ContextBlock(id=7, text="seven", tokens=3), *blocks("eight"))


def test_ids_come_back_with_their_type() -> None:
    renderings = Renderings()
    [found] = renderings.find(
        renderings.render([ContextBlock(id=1, text="x"), ContextBlock(id="1", text="x")])
    )
    assert [block.id for block in found.blocks] == [1, "1"]
    assert [type(block.id) for block in found.blocks] == [int, str]


def test_the_same_block_twice_is_shown_once() -> None:
    assert Renderings().render(blocks("a", "b", "a")) == "[Doc_1] a\n\n[Doc_2] b"


def test_nothing_is_remembered_of_an_empty_context() -> None:
    renderings = Renderings()
    assert renderings.render([]) == ""
    assert len(renderings) == 0
    assert renderings.find("") == []
    assert renderings.find("anything") == []


def test_text_that_was_not_rendered_is_not_found() -> None:
    renderings = Renderings()
    context = renderings.render(blocks("first", "second"))
    assert renderings.find("[Doc_1] first\n\n[Doc_2] other") == []
    assert renderings.find(context[:-1]) == []
    assert renderings.find(context.replace("first", "First")) == []


def test_several_contexts_are_found_from_left_to_right() -> None:
    renderings = Renderings()
    one, other = renderings.render(blocks("a", "b")), renderings.render(blocks("c"))
    found = renderings.find(f"{other} and {one} and {other}")
    assert found_texts(found) == [["c"], ["a", "b"], ["c"]]
    assert [each.start for each in found] == sorted(each.start for each in found)


def test_of_contexts_that_begin_at_the_same_place_the_longest_counts() -> None:
    renderings = Renderings()
    renderings.render(blocks("a"))
    both = renderings.render(blocks("a", "b"))
    assert found_texts(renderings.find(both)) == [["a", "b"]]


def test_a_context_inside_a_document_is_part_of_the_document() -> None:
    renderings = Renderings()
    inside = renderings.render(blocks("a", "b"))
    outside = renderings.render(blocks("first", f"quotes {inside} whole"))
    assert found_texts(renderings.find(outside)) == [["first", f"quotes {inside} whole"]]


def test_openings_that_overlap_are_all_looked_at() -> None:
    renderings = Renderings()
    renderings.render(blocks("x"))
    context = renderings.render(blocks("y" * 20), Templates(label="1] {ordinal}"))
    assert context.startswith("1] 1 yyy")
    assert found_texts(renderings.find(f"[Doc_{context}")) == [["y" * 20]]


def test_other_templates_are_found_too() -> None:
    renderings = Renderings()
    short = Templates(label="{ordinal}", block="{label}) {text};", separator=" ")
    context = renderings.render(blocks("a", "", "c" * 100), short)
    assert context == f"1) a; 2) ; 3) {'c' * 100};"
    assert found_texts(renderings.find(f"..{context}..")) == [["a", "", "c" * 100]]


@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=4),
    before=st.text(max_size=20),
    behind=st.text(max_size=20),
)
def test_whatever_was_rendered_is_found_again(texts: list[str], before: str, behind: str) -> None:
    renderings = Renderings()
    given_blocks = [ContextBlock(id=n, text=text) for n, text in enumerate(texts)]
    context = renderings.render(given_blocks)
    found = renderings.find(before + context + behind)
    assert [one.blocks for one in found if one.start == len(before)] == [tuple(given_blocks)]


def test_a_text_that_was_planned_is_found_without_blocks() -> None:
    renderings = Renderings()
    planned = "[Doc_1] a\n\n[Doc_2] b\n\nRead [Doc_2] first."
    renderings.remember_planned(planned)
    renderings.remember_planned("")
    assert renderings.find(f"- {planned} -") == [
        FoundContext(2, 2 + len(planned), text_digest(planned), ())
    ]


def test_the_beginning_of_a_planned_text_is_no_context() -> None:
    renderings = Renderings()
    context = renderings.render(blocks("a", "b"))
    renderings.remember_planned(f"{context}\n\nRead [Doc_2] first.")
    assert found_texts(renderings.find(f"{context}\n\nRead [Doc_2] first.")) == [[]]
    assert found_texts(renderings.find(f"{context}\n\nWhich?")) == [["a", "b"]]


def test_a_document_in_a_planned_text_cannot_pose_as_a_context() -> None:
    renderings = Renderings()
    posing = renderings.render(blocks("a", "b"))
    renderings.remember_planned(f"[Doc_1] quotes {posing}\n\n[Doc_2] c")
    assert found_texts(renderings.find(f"[Doc_1] quotes {posing}\n\n[Doc_2] c")) == [[]]


def test_the_least_recently_seen_is_forgotten_first() -> None:
    renderings = Renderings(max_renderings=2)
    first = renderings.render(blocks("first"))
    second = renderings.render(blocks("second"))
    renderings.find(first)
    third = renderings.render(blocks("third"))
    assert len(renderings) == 2
    assert found_texts(renderings.find(first + second + third)) == [["first"], ["third"]]


def test_contexts_of_many_blocks_count_by_their_blocks() -> None:
    renderings = Renderings(max_spans=5)
    first = renderings.render(blocks("a", "b", "c"))
    second = renderings.render(blocks("d", "e", "f"))
    assert found_texts(renderings.find(first + second)) == [["d", "e", "f"]]
    huge = renderings.render(blocks(*"abcdefgh"))
    assert found_texts(renderings.find(huge)) == [list("abcdefgh")], "the latest is always kept"
    assert len(renderings) == 1


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    renderings = Renderings(max_renderings=3)
    for number in range(50):
        renderings.render(blocks(f"text {number}" * (number % 9), str(number)))
    assert len(renderings) == len(renderings._by_digest) == 3
    assert sum(map(len, renderings._by_head.values())) == 3
    assert renderings._head_lengths.total() == renderings._openings.total() == 3
    assert renderings._spans == 6


def test_rendering_the_same_again_counts_once() -> None:
    renderings = Renderings()
    assert renderings.render(blocks("a", "b")) == renderings.render(blocks("a", "b"))
    assert len(renderings) == 1
    assert renderings._spans == 2


def test_threads_may_render_and_find_at_the_same_time() -> None:
    renderings = Renderings(max_renderings=50)

    def render_and_find(name: int) -> int:
        for number in range(50):
            context = renderings.render(blocks(f"{name} {number}", "x"))
            if renderings.find(f"- {context} -"):
                continue
            assert len(renderings) == 50, "only a full memory forgets"
        return name

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(render_and_find, range(8))) == list(range(8))


def test_texts_with_lone_surrogates_are_found() -> None:
    renderings = Renderings()
    context = renderings.render(blocks("\ud800", "b"))
    assert found_texts(renderings.find(f"\udfff{context}")) == [["\ud800", "b"]]


def test_the_texts_themselves_are_not_kept() -> None:
    renderings = Renderings()
    renderings.render(blocks("public " * 20 + "a secret"))
    assert "secret" not in repr(vars(renderings))


def test_the_beginning_of_a_longer_context_is_no_context():
    renderings = Renderings()
    short = renderings.render([ContextBlock(id="a", text="A"), ContextBlock(id="b", text="B")])
    assert renderings.find(f"{short}\n\n[Doc_3] C") == []
    assert len(renderings.find(f"{short}\n\nWhich?")) == 1
