"""Reading the code blocks of Markdown pages, and the commands and outputs in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(one.relative_to(ROOT)) for one in ROOT.glob("docs/**/*.md"))]

_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: The page's path in the repository.
        line: The line on which its first line of code stands, from 1.
        heading: The heading above it.
        language: What stands behind the fence.
        code: What stands in it.
        follows: The block with nothing between that and this one.
    """

    page: str
    line: int
    heading: str
    language: str
    code: str
    follows: Block | None

    @property
    def name(self) -> tuple[str, str]:
        """The page and the first line of code, by which a list of exceptions names a block."""
        return self.page, self.code.split("\n", 1)[0]


@dataclass(frozen=True)
class Command:
    """A command of a console block, and what the page says that it prints."""

    words: tuple[str, ...]
    output: str


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """Return the code blocks of a page, or of the text that is given for it."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    blocks: list[Block] = []
    end = 0
    heading = ""
    for match in _FENCE.finditer(text):
        between = text[end : match.start()]
        heading = ([heading, *re.findall(r"^#+ (.+)$", between, re.MULTILINE)])[-1]
        is_next = bool(blocks) and not between.strip()
        line = text.count("\n", 0, match.start()) + 2
        code = dedent(match[3])
        previous = blocks[-1] if is_next else None
        blocks.append(Block(page, line, heading, match[2].strip(), code, previous))
        end = match.end()
    fences = len(re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE))
    assert fences == 2 * len(blocks), f"{page} has a fence that is not read as a code block"
    return blocks


def commands_of(code: str) -> list[Command]:
    commands = []
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE):
        lines = part.split("\n")
        end = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
        words = shlex.split("\n".join(lines[: end + 1]).replace("\\\n", " "), comments=True)
        if words:
            commands.append(Command(tuple(words), "\n".join(lines[end + 1 :]).strip("\n")))
    assert not code or code.startswith("$ "), "a console block begins with a command"
    return commands
