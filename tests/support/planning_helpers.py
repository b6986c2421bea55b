"""What the tests of the planner share: small requests, and the invariants of a plan in words."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ContextRequest, Plan, ReusePlanner
from ctxreuse.context.blocks import BlockId
from ctxreuse.measure.replay.plan_file import plan_under
from ctxreuse.measure.replay.policies import MeasuredPolicy

STRATEGIES = ("reuse", "paper", "none")

Identity = tuple[type, BlockId, str]


def block(block_id: BlockId, tokens: int | None = None) -> ContextBlock:
    return ContextBlock(id=block_id, text=f"text of {block_id}", tokens=tokens)


def request(block_ids: Iterable[BlockId], query: str = "", **fields: Any) -> ContextRequest:
    return ContextRequest([block(block_id) for block_id in block_ids], query, **fields)


def big_request(block_ids: Iterable[BlockId], query: str = "", **fields: Any) -> ContextRequest:
    """Return a request whose blocks count 100 tokens each: worth moving."""
    return ContextRequest([block(block_id, 100) for block_id in block_ids], query, **fields)


def sent_ids(plan: Plan) -> list[BlockId]:
    return [sent.id for sent in plan.blocks]


def without_id(plan: Plan) -> Plan:
    """Return a plan with its generated request id blanked, to compare all other fields."""
    return dataclasses.replace(plan, request_id="")


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def order_words(*names: BlockId) -> str:
    labels = " > ".join(f"[Doc_{name}]" for name in names)
    return (
        f"Please read the context in the following priority order: {labels} "
        "and answer the question."
    )


def location_words(name: BlockId) -> str:
    return f"Please refer to [Doc_{name}] in the previous conversation."


def texts_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    texts = []
    for message in messages:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content]
    return texts


def identity(one: ContextBlock) -> Identity:
    return (type(one.id), one.id, one.text)


def assert_keeps_the_promises(plan: Plan) -> None:
    """Check a plan of the default templates against what is promised, byte for byte."""
    asked = plan.request
    unique = {identity(one): one for one in reversed(asked.blocks)}
    retrieved = list(dict.fromkeys(identity(one) for one in asked.blocks))
    sent = [identity(one) for one in plan.blocks]
    left_out = [one for one in retrieved if one not in set(sent)]

    # blocks and references are exactly the request's blocks, each once
    assert len(set(sent)) == len(sent)
    assert set(sent) <= set(retrieved)
    assert asked.history or not left_out
    assert [(type(i), i) for i in plan.references] == [one[:2] for one in left_out]

    # a label is made from its block alone
    label_of = {one: plan.templates.label_of(unique[one]) for one in retrieved}
    for one, label in label_of.items():
        named = ContextBlock(id=plan.labels[label], text=one[2])
        assert plan.templates.label_of(named) == label

    # a reference's text really stands, under its label, in the messages before, and no other does
    before = texts_of(asked.history or ())
    words_of = {one: location_words(one[1]) for one in left_out}
    assert plan.location_annotations == tuple(dict.fromkeys(words_of.values()))
    for one in left_out:
        label = label_of[one]
        assert any(f"{label} {one[2]}" in text for text in before)
        named = [other for other in sent if label_of[other] == label or label in other[2]]
        assert all(other[2] == one[2] for other in named)

    # a later turn keeps the retriever's order; a first turn says what it moved
    shown = retrieved if asked.history else sent
    annotation = None
    if not asked.history and sent != retrieved:
        ranking = " > ".join(label_of[one] for one in retrieved)
        annotation = (
            f"Please read the context in the following priority order: {ranking} "
            "and answer the question."
        )
    assert plan.order_annotation == annotation
    pieces = []
    for one in shown:
        piece = words_of.get(one) or f"{label_of[one]} {unique[one].text}"
        if one not in words_of or piece not in pieces:  # each label is referred to once
            pieces.append(piece)
    pieces += [piece for piece in (annotation, asked.query) if piece]
    system = [] if asked.system is None else [{"role": "system", "content": asked.system}]
    assert plan.messages() == [*system, *(asked.history or ()), user("\n\n".join(pieces))]


def plan_everything(
    planner: ReusePlanner, requests: list[ContextRequest], strategy: str, *, batch: bool
) -> list[Plan]:
    """Plan requests as one batch or one after the other; return the plans in input order."""
    if batch:
        return list(planner.plan_batch(requests, strategy).in_input_order())
    return [planner.plan(one, strategy) for one in requests]


ODD_TEXTS = (
    "",
    " ",
    "\n",
    "\n\n",
    "a",
    "a\n\nb",
    "\x00\x1b[31m\x7f",
    "\ud800 lone surrogate",
    "עברית 中文 🦜",
    "[Doc_1]",
    "[Doc_2] a",
    "x\n\n[Doc_3] a",
    "[Doc_a] a",
    "{label} {text} {letters} %s",
    "long " * 300,
)
ODD_IDS = (0, 1, "1", -1, 10**30, "", "a", "\x00", "\ud800", "[Doc_1]", "ü" * 70)

odd_blocks = st.builds(
    ContextBlock,
    id=st.one_of(st.none(), st.sampled_from(ODD_IDS)),
    text=st.sampled_from(ODD_TEXTS),
    tokens=st.sampled_from((None, None, 0, 1, 20, 1000)),
)
plain_blocks = st.integers(0, 9).map(lambda number: block(number, 7 * number))
odd_contexts = st.lists(odd_blocks | plain_blocks | st.sampled_from(ODD_TEXTS), max_size=7)
plain_contexts = st.lists(plain_blocks, max_size=6)
queries = st.sampled_from(("", "Why?", "[Doc_1] says what?", "{order} \udfff"))
first_turns = st.builds(
    ContextRequest,
    odd_contexts | plain_contexts,
    queries,
    system=st.sampled_from((None, None, "", "Be brief.")),
    history=st.sampled_from((None, ())),
    conversation_id=st.sampled_from((None, 1, "1")),
    tenant=st.sampled_from(("", "", "t")),
)
later_turns = st.builds(
    ContextRequest,
    odd_contexts,
    queries,
    history=st.sampled_from(([user("[Doc_1] a")], [user("Hello."), assistant("[Doc_7] a")])),
    conversation_id=st.sampled_from((None, 1, "1")),
)
requests_of_any_kind = st.lists(first_turns | later_turns, max_size=8)


def plan_trace(trace, planner, mode, strategy="reuse", **options):
    return plan_under(MeasuredPolicy(strategy, strategy, mode), trace, planner, **options)


def tokenizer_file(folder: Path, *words: str) -> str:
    """Save a tokenizer that knows some words, and takes others for one; return where it is."""
    tokenizers = pytest.importorskip("tokenizers")
    numbers = {word: number for number, word in enumerate(("[UNK]", *words))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def write_jsonl(path: Path, *lines: Mapping[str, Any] | str | bytes) -> str:
    """Write lines, objects as JSON and texts and bytes as they are; return the path."""
    with open(path, "wb") as file:
        for line in lines:
            text = json.dumps(line) if isinstance(line, Mapping) else line
            file.write((text.encode() if isinstance(text, str) else text) + b"\n")
    return str(path)


def first_turn(planner, block_ids, query="First?", conversation_id="c", **fields):
    """Plan a first turn; return its plan and the history that the second turn stands behind."""
    plan = planner.plan(
        request(block_ids, query, history=[], conversation_id=conversation_id, **fields)
    )
    return plan, [*plan.messages(), assistant("Yes.")]


def later_turn(planner, block_ids, history, query="Then?", conversation_id="c", **fields):
    return planner.plan(
        request(block_ids, query, history=history, conversation_id=conversation_id, **fields)
    )
