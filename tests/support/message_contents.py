"""Contents of messages as applications and middleware write them, and what is said in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hypothesis import strategies as st

MARKS = ("cache_control", "prompt_cache_breakpoint")
MOST_MARKS = 4
CONTEXT = "<the context>"
"""Stands in generated texts where a test puts a context."""

words = st.text("ab \n[]", max_size=12)
_mark = st.just({"cache_control": {"type": "ephemeral"}})
_fields = st.dictionaries(st.sampled_from(["citations", "extra", "index"]), st.integers(0, 3))
_around = st.tuples(words, words).map(lambda pair: f"{pair[0]}\n{CONTEXT}\n{pair[1]}")


def _text(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda text, mark, more: {"type": "text", "text": text, **more, **mark},
        texts,
        st.one_of(st.just({}), st.just({}), _mark),
        st.one_of(st.just({}), _fields),
    )


_image = st.builds(
    lambda data, mark: {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{data}"},
        **mark,
    },
    st.sampled_from(["AA==", "AQ=="]),
    st.one_of(st.just({}), _mark),
)
_unknown = st.builds(
    lambda kind, more: {"type": kind, **more}, st.sampled_from(["audio", "video", "thing"]), _fields
)
_others = st.one_of(_text(words), _image, _unknown)


def contents(*, with_context: bool) -> st.SearchStrategy[Any]:
    """Return contents: a text, or a list of parts; one of them with a context if there is to be."""
    if not with_context:
        return st.one_of(words, st.lists(_others, max_size=3))
    parts = st.tuples(
        st.lists(_others, max_size=2), _text(_around), st.lists(_others, max_size=2)
    ).map(lambda found: [*found[0], found[1], *found[2]])
    return st.one_of(_around, parts)


class Message(NamedTuple):
    """A message: who says it, what, and the name and fields beside it."""

    role: str
    content: Any
    beside: Mapping[str, Any]

    def filled(self, context: str) -> Message:
        """Return it with the context in its place."""
        return self._replace(content=_filled(self.content, context))


def _filled(content: Any, context: str) -> Any:
    if isinstance(content, str):
        return content.replace(CONTEXT, context)
    return [
        {**part, "text": part["text"].replace(CONTEXT, context)} if "text" in part else part
        for part in content
    ]


_beside = st.fixed_dictionaries({}, optional={"name": st.just("ann")})


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Draw messages of which the last has a context."""
    turns = draw(st.lists(st.sampled_from(["user", "assistant"]), max_size=3))
    roles = [*draw(st.sampled_from([[], ["system"]])), *turns]
    before = [Message(role, draw(contents(with_context=False)), draw(_beside)) for role in roles]
    return [*before, Message("user", draw(contents(with_context=True)), draw(_beside))]


class Said(NamedTuple):
    """What contents say, however texts are cut, and where they are marked."""

    items: list[Any]
    marks: list[tuple[int, int, int]]


def said(all_contents: Iterable[Any]) -> Said:
    """Return what the contents of messages say.

    Returns:
        For each content its texts, those that follow each other joined, other parts, and fields on
        texts; and each mark as content, characters and other items before it.
    """
    items: list[Any] = []
    marks: list[tuple[int, int, int]] = []
    for number, content in enumerate(all_contents):
        of_content: list[Any] = []
        characters = others = 0
        for part in [content] if isinstance(content, str) else content:
            bare = {"type": "text", "text": part} if isinstance(part, str) else dict(part)
            found = [bare.pop(name) for name in MARKS if name in bare]
            if bare.get("type") == "text":
                text = bare.pop("text")
                characters += len(text)
                if of_content and isinstance(of_content[-1], str):
                    of_content[-1] += text
                elif text:
                    of_content.append(text)
                bare.pop("type")
            if bare:
                of_content.append(bare)
                others += 1
            assert len(found) < 2, "marked in two providers' words"
            if found:
                marks.append((number, characters, others))
        items.append(of_content)
    return Said(items, marks)


def check_kept(
    given: Iterable[Any], sent: Iterable[Any], passed: Iterable[int] = (), cache: str = ""
) -> None:
    """Check that what is sent says what was given, with the user's marks, and never too many.

    Args:
        given: The contents of the messages given.
        sent: Of those sent.
        passed: Messages that others have been answered behind: the mark at the end of one may go.
        cache: The profile's name; where it has no marks, those of the user are none of ours.
    """
    before, after = said(given), said(sent)
    assert after.items == before.items
    if cache == "vllm":
        assert after.marks == before.marks
        return
    assert len(after.marks) <= MOST_MARKS
    users = [one for one in before.marks if one[0] not in set(passed)][-MOST_MARKS:]
    assert set(users) <= set(after.marks)
