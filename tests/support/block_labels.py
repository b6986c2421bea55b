"""Texts as prompts show them by default where these have labels."""

from ctxreuse import ContextBlock, Templates


def label(text: str) -> str:
    return Templates().label_of(ContextBlock(text=text))


def labelled(*texts: str) -> str:
    return "\n\n".join(f"{label(text)} {text}" for text in texts)


def located(*texts: str) -> str:
    """Return the words that say that texts stand above."""
    return f"See also {', '.join(map(label, texts))} above."


def ranked(*texts: str) -> str:
    """Return the words that say which texts are best."""
    return f"Read documents {', '.join(map(label, texts))} first."


WAYS_TO_CITE = [
    ("{a} and {c}, but {a}.", "ac"),
    ("{c}{b}", "cb"),
    ("[{a_}, {b_}; {c_}]", "abc"),
    ("So it is ({b_}), ({c_} and {a_}).", "bca"),
    ("{a}.pdf", "a"),
    ("[{a_}x] {b_} c", ""),
    ("", ""),
]
"""What an answer says, by letters of labels, with `_` without brackets, and what it cites."""
