"""Forms of blocks' labels: what they cost in tokens, and whether a model copies the right one.

Printed are, for each form, the tokens that a label adds before a text, the mean over 1,000 blocks
in prompts of ten, and how often two of a hundred blocks would have the same label. With a server, a
model is asked for the label of the passage that answers a question of XQuAD, one of ten: questions,
passages and their order are the same for all forms. Reads the folder that CTXREUSE_DATA names. Run
with `python benchmarks/labels.py --base-url http://127.0.0.1:8000/v1`; without a server, leave that
out.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from ctxreuse.context.blocks import text_digest
from ctxreuse.context.rendering import render_messages
from ctxreuse.measure.replay.prompts import Tokenizer
from ctxreuse.measure.replay.simulate import load_tokenizer
from ctxreuse.serving import EngineClient
from public_data.datasets import Dataset, load
from server import describe_server
from shared import data_folder, new_parser, new_table

MODELS = Path(os.environ.get("CTXREUSE_VLLM_HOME") or ".venv-vllm", "models")
LABELLED = 1_000
PASSAGES = 10
SYSTEM = (
    "Each document begins with its label, in square brackets. Name the document that answers the "
    "question: reply with its label, never with the answer."
)
"""Without it the smallest models answer the question."""
ASKED = "Which document answers the question? Reply with its label only."
CONSONANTS = "bcdfghjklmnpqrstvwxz"


class Form(NamedTuple):
    """How labels look: a pattern, and what each letter is drawn from; ordinals have no letters."""

    pattern: str
    letters: Sequence[str] = ()

    def label(self, text: str, place: int) -> str:
        """Return the label of a text, which is at a place of the prompt, from 1."""
        drawn = zip(text_digest(text), self.letters, strict=False)
        name = "".join(letters[byte % len(letters)] for byte, letters in drawn)
        return self.pattern.format(name or place)

    def alike(self) -> float:
        """Return the probability that two of a hundred blocks have the same label."""
        number = math.prod(map(len, self.letters)) if self.letters else math.inf
        return -math.expm1(-math.comb(100, 2) / number)


FORMS = {
    "ordinals": Form("[Doc_{}]"),
    "bare ordinals": Form("[{}]"),
    "3 letters": Form("[{}]", [ascii_lowercase] * 3),
    "4 letters": Form("[{}]", [ascii_lowercase] * 4),
    "4 consonants": Form("[{}]", [CONSONANTS] * 4),
    "4 of base 32": Form("[{}]", [ascii_lowercase + "234567"] * 4),
    "2 syllables": Form("[{}]", [CONSONANTS, "aeiou"] * 2),
    "Doc_, 4 letters": Form("[Doc_{}]", [ascii_lowercase] * 4),
    "4 capitals": Form("[{}]", [ascii_uppercase] * 4),
}


class Task(NamedTuple):
    """A question, its passages as they stand in the prompt, and the place of the right one."""

    question: str
    passages: list[str]
    right: int


def tasks(dataset: Dataset, number: int) -> Iterator[Task]:
    """Yield questions, each with passages; which ones, and where, is drawn."""
    random = Random(0)
    texts = {one.id: one.text for one in dataset.passages}
    known = [one for one in dataset.questions if one.gold]
    random.shuffle(known)
    for one in known[:number]:
        names = random.sample([name for name in texts if name not in one.gold], PASSAGES - 1)
        right = random.randrange(PASSAGES)
        names.insert(right, min(one.gold))
        yield Task(one.text, [texts[name] for name in names], right)


def copied(answer: str, labels: Sequence[str]) -> int | None:
    """Return the place of the label that an answer begins with; brackets may be missing."""
    for place, label in enumerate(labels):
        if re.match(rf"\s*\[?{re.escape(label.strip('[]'))}(?!\w)", answer):
            return place
    return None


def tokenizers(files: Sequence[Path]) -> Iterator[tuple[str, Tokenizer]]:
    """Yield names, and the tokenizers of files; without files, of those that are found."""
    package = Path(getattr(find_spec("wordllama"), "origin", None) or "missing").parent
    found = (MODELS.glob("*/tokenizer.json"), package.glob("tokenizers/*_tokenizer_config.json"))
    for file in files or [one for each in found for one in sorted(each)]:
        name = file.parent.name if file.name == "tokenizer.json" else file.stem.split("_token")[0]
        yield name, load_tokenizer(str(file))


def added_tokens(form: Form, texts: Sequence[str], tokenizer: Tokenizer) -> float:
    """Return how many tokens a label adds where a text follows another one."""
    added = 0
    for number in range(LABELLED):
        before, text = texts[number % len(texts)], texts[(number + 1) % len(texts)]
        label = form.label(f"{number} {text}", number % PASSAGES + 1)
        labelled, bare = f"{before}\n\n{label} {text}", f"{before}\n\n{text}"
        added += len(tokenizer.encode(labelled).ids) - len(tokenizer.encode(bare).ids)
    return added / LABELLED


async def ask(base_url: str, system: str, drawn: Sequence[Task]) -> dict[str, list[int]]:
    """Return, by form, for each task 2 if the answer is the right label, 1 if another one, or 0."""
    server = describe_server(base_url, None)
    scores: dict[str, list[int]] = {name: [] for name in FORMS}
    async with EngineClient(server.base_url, server.model) as client:
        for number, task in enumerate(drawn, start=1):
            for name, form in FORMS.items():
                labels = [form.label(text, at) for at, text in enumerate(task.passages, start=1)]
                shown = map("{} {}".format, labels, task.passages)
                content = "\n\n".join([*shown, f"Question: {task.question}", ASKED])
                messages = render_messages(system or None, None, content)
                answer = (await client.complete(messages, max_tokens=12, temperature=0)).text
                place = copied(answer, labels)
                scores[name].append(0 if place is None else 1 + (place == task.right))
                said = f"{name}, {labels[task.right]}, {scores[name][-1]}, {answer!r}"
                print(f"{number} of {len(drawn)}: {said}", file=sys.stderr, flush=True)
    return scores


def compared(scores: Sequence[int], ordinals: Sequence[int]) -> tuple[int, ...]:
    """Return how many are right, are labels, and are right where ordinals are not or vice versa."""
    pairs = list(zip(scores, ordinals, strict=True))
    won, lost = (sum(a == 2 > b for a, b in each) for each in (pairs, map(reversed, pairs)))
    return scores.count(2), len(scores) - scores.count(0), won, lost


def main() -> None:
    """Print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--base-url", help="a vLLM server, whose first model is asked")
    parser.add_argument("--questions", type=int, default=60, help="of XQuAD (default: 60)")
    parser.add_argument("--system", default=SYSTEM, help="what the model is told first")
    of_tokenizers = "a tokenizer.json, repeatable (default: those of `make vllm` and wordllama)"
    parser.add_argument(
        "--tokenizer", type=Path, action="append", default=[], help=of_tokenizers, metavar="FILE"
    )
    options = parser.parse_args()
    dataset = load("jsonl", data_folder("xquad") / "xquad", chunk_tokens=10**6)
    texts = [one.text for one in dataset.passages]
    known = dict(tokenizers(options.tokenizer))
    drawn = list(tasks(dataset, options.questions)) if options.base_url else []
    scores = asyncio.run(ask(options.base_url, options.system, drawn)) if drawn else {}
    answers = (f"right of {len(drawn)}", "labels", "won", "lost") if drawn else ()
    table = new_table(
        "labels; won and lost: right where ordinals are wrong, and wrong where they are right",
        ("form", "such as"),
        (*(f"tokens, {name.partition('-')[0]}" for name in known), "alike in 100", *answers),
    )
    for name, form in FORMS.items():
        row = [f"{added_tokens(form, texts, one):.2f}" for one in known.values()]
        row.append(f"{form.alike():.1%}")
        row += map(str, compared(scores[name], scores["ordinals"]) if drawn else ())
        table.add_row(name, escape(form.label(texts[0], 1)), *row)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
