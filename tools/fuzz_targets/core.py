"""Requests, plans, conversations, prompts and how they were sent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from random import Random
from typing import Any

import pyarrow as pa

from ctxreuse import ContextBlock, ContextRequest, Plan, ReusePlanner
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Reference, render_block
from ctxreuse.context.scope import RequestScope
from ctxreuse.distributed.partitions import contexts_of, partition
from ctxreuse.distributed.planned_table import planned_table
from ctxreuse.distributed.ray_data import ColumnReader
from ctxreuse.errors import CtxreuseError
from ctxreuse.pipeline.known_texts import KnownTexts
from ctxreuse.pipeline.prompt_turn import PromptPart, PromptPlanner, ScopedPrompt
from ctxreuse.planning.prompt_records import Edit, Left
from fuzz_targets.mutation import Target, json_value, junk, mutated, nested, text

_MESSAGES: list[Any] = [
    {"role": "user", "content": "[PRMG] The Tagus\n\nWhich?"},
    {"role": "assistant", "content": "It flows through Lisbon."},
    {"role": "user", "content": [{"type": "text", "text": "[ZTSN] a"}, {"type": "image_url"}]},
    {"role": "tool", "tool_call_id": "c", "content": "{}"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {}}]},
]


def _block(source: Random) -> Any:
    if source.random() < 0.05:
        return junk(source)
    if source.random() < 0.1:
        return text(source)
    name = source.choice((None, "a", "b", "c", 1, 2, "1", 10**400, text(source, 3)))
    return {"text": text(source), "id": name, "tokens": source.choice((None, None, 0, 5, 900))}


def _request(source: Random) -> dict[str, Any]:
    """Return the fields of a request; blocks as dicts."""
    fields: dict[str, Any] = {"blocks": [_block(source) for _ in range(source.randrange(8))]}
    fields["query"] = text(source)
    if source.random() < 0.4:
        messages = [source.choice(_MESSAGES) for _ in range(source.randrange(5))]
        fields["history"] = mutated(messages, source, 2)
    if source.random() < 0.4:
        fields["conversation_id"] = source.choice(("c", 1, text(source, 3)))
    if source.random() < 0.3:
        fields["tenant"] = source.choice(("", "A", "B", text(source, 3)))
    if source.random() < 0.2:
        fields["request_id"] = source.choice(("request-0", "request-1", 1, "x"))
    if source.random() < 0.1:
        fields[source.choice(("blocks", "query", "history", "tenant", "system"))] = junk(source)
    return fields


def _as_request(fields: Mapping[str, Any]) -> ContextRequest:
    blocks = fields["blocks"]
    if isinstance(blocks, list):
        blocks = [
            ContextBlock(**one) if isinstance(one, dict) and one.keys() >= {"text", "id"} else one
            for one in blocks
        ]
    return ContextRequest(blocks, **{name: one for name, one in fields.items() if name != "blocks"})


def _planning(source: Random) -> dict[str, Any]:
    settings = {"capacity_tokens": source.choice((None, None, 100, 5000))}
    steps: list[Any] = []
    for _ in range(source.randrange(1, 6)):
        strategy = source.choice(("reuse", "reuse", "reuse", "paper", "none"))
        kind = source.choice(("plan", "plan", "batch", "evict", "follow"))
        requests = [_request(source) for _ in range(source.randrange(1, 5))]
        steps.append((kind, strategy, requests if kind == "batch" else requests[0]))
    return {"settings": settings, "steps": steps}


def _plan_all(given: Mapping[str, Any]) -> None:
    """Plan requests one after the other; check each plan."""
    planner = ReusePlanner(**given["settings"])
    latest: Plan | None = None
    refused: CtxreuseError | None = None
    for kind, strategy, fields in given["steps"]:
        try:
            if kind == "evict":
                planner.evict(["request-0", "request-1", 1])
                planner.evict_tokens(50)
            elif kind == "batch":
                requests = [_as_request(one) for one in fields]
                batch = planner.plan_batch(requests, strategy=strategy)
                assert sorted(batch.order) == list(range(len(requests)))
                for request, plan in zip(requests, batch.in_input_order(), strict=True):
                    check_plan(request, plan)
            else:
                if kind == "follow" and latest is not None:
                    answer = {"role": "assistant", "content": "OK."}
                    said = [one for one in latest.messages() if one.get("role") != "system"]
                    fields = {**fields, "history": [*said, answer]}
                request = _as_request(fields)
                latest = planner.plan(request, strategy=strategy)
                check_plan(request, latest)
        except CtxreuseError as error:
            refused = error
    if refused is not None:
        raise refused


def check_plan(request: ContextRequest, plan: Plan) -> None:
    """Check that a plan loses, doubles and alters nothing, and that its text shows that."""
    sent = [part for part in plan.parts if not isinstance(part, Reference)]
    left_out = [part for part in plan.parts if isinstance(part, Reference)]
    blocks = {block.key: block for block in request.blocks}
    keys = [part.block.key for part in sent]
    assert len(set(keys)) == len(keys), "a block is sent twice"
    assert len(keys) + len(left_out) == len(blocks), "a block is missing, or doubled"
    assert all(blocks[part.block.key].text == part.block.text for part in sent), "a text is altered"
    rest = [block.id for key, block in blocks.items() if key not in keys]
    assert list(plan.references) == rest
    assert left_out == [] or request.history is not None
    content = plan.messages()[-1]["content"]
    for part in sent:
        text = part.block.text
        if plan.is_labelled:
            same = [one.block.id for one in sent if one.label == part.label]
            assert plan.labels[part.label] in same
            text = render_block(part.label, text, plan.templates)
        assert text in content
    shown = [
        one if isinstance(one, str) else json.dumps(one, default=repr, ensure_ascii=False)
        for one in (message.get("content") for message in request.history or ())
    ]
    texts = {block.id: block.text for block in blocks.values() if block.key not in keys}
    for part in left_out:
        assert part.annotation in content
        if len(texts) == len(left_out):
            whole = texts[part.id]
            if part.label:  # else it stands there without one
                whole = render_block(part.label, whole, plan.templates)
            within = json.dumps(whole, ensure_ascii=False)[1:-1]
            assert any(whole in one or within in one for one in shown), "points nowhere"


def _chat(source: Random) -> dict[str, Any]:
    steps = []
    for _ in range(source.randrange(1, 8)):
        kind = source.choice(("plan", "plan", "record", "record", "compact", "junk"))
        value: Any = text(source)
        if kind == "plan":
            value = [
                one for _ in range(source.randrange(4)) if isinstance(one := _block(source), dict)
            ]
        elif kind == "junk":
            value = junk(source)
        steps.append((kind, value, text(source)))
    return {"id": source.choice(("c", 1, text(source, 3))), "system": text(source), "steps": steps}


def _converse(given: Mapping[str, Any]) -> None:
    """Lead a conversation; what was sent stays as it was."""
    chat = ReusePlanner().conversation(given["id"], system=given["system"])
    refused: CtxreuseError | None = None
    for kind, value, query in given["steps"]:
        before = chat.messages()
        try:
            if kind == "plan":
                request = ContextRequest(
                    [ContextBlock(**one) if one.keys() >= {"text", "id"} else one for one in value],
                    query,
                )
                plan = chat.plan(request.blocks, query=query)
                check_plan(plan.request, plan)
            elif kind == "record":
                chat.record(value)
            elif kind == "compact":
                chat.compact(value)
            else:
                chat.record(value)
        except CtxreuseError as error:
            refused = error
            assert chat.messages() == before, "a refused call changes nothing"
    if refused is not None:
        raise refused


def _prompt(source: Random) -> dict[str, Any]:
    """Return contexts of two tenants, and prompts that hold them whole, cut and quoted."""
    contexts = [
        [(source.choice("abc"), text(source)) for _ in range(source.randrange(1, 5))]
        for _ in range(3)
    ]
    prompts = [
        [
            (source.choice(("context", "cut", "text")), source.randrange(3), text(source))
            for _ in range(source.randrange(1, 5))
        ]
        for _ in range(source.randrange(1, 4))
    ]
    return {"contexts": contexts, "prompts": prompts, "cut": source.randrange(1, 40)}


def _plan_prompts(given: Mapping[str, Any]) -> None:
    known = KnownTexts()
    planner = PromptPlanner(ReusePlanner(), known=known)
    rendered = []
    for context in given["contexts"]:
        known.add("", [words for _, words in context])
        rendered.append("\n\n".join(words for _, words in context))
    for pieces in given["prompts"]:
        parts = []
        for kind, number, words in pieces:
            shown = rendered[number]
            piece = {"context": shown, "cut": shown[: -given["cut"]], "text": ""}[kind]
            parts.append(PromptPart("user", words + piece + words))
        [planned] = planner.plan([ScopedPrompt(tuple(parts), RequestScope())])
        assert len(planned.texts) == len(parts)
        for plan in planned.plans:
            check_plan(plan.request, plan)
        for given_part, sent in zip(parts, planned.texts, strict=True):
            assert _said(given_part.text) == _said(sent), "something is lost, doubled or altered"


def _said(words: str) -> list[str]:
    """Return what a text says but for its order and our own words."""
    return sorted("".join(_RANKING.sub("", words).split()))


_RANKING = re.compile(r"Read documents \d+(?:, \d+)* first\.")
_EDIT: list[Any] = [
    [[0, 5], "words", {"left": [[[[5, 9], "of"], "[BCDF]"]], "separator": "\n\n"}, [9, 40]],
    [5, 5],
    [-1, 0],
    ["group"],
]


def _carried(source: Random) -> Any:
    return source.choice((mutated(_EDIT, source), json_value(source), nested(source)))


def _read_edit(value: Any) -> None:
    """Read how a message was sent; what is sound is applied, and written as it was read."""
    edit = Edit.of_json(value, 40)
    if edit is None:
        return
    assert Edit.of_json(json.loads(edit.encoded()), 40) == edit
    edit.applied("x" * 40, DEFAULT_TEMPLATES)
    if not any(isinstance(one, Left) for one in edit.pieces or ()):
        assert edit.applied("x" * 40, DEFAULT_TEMPLATES, []) == edit.applied(
            "x" * 40, DEFAULT_TEMPLATES
        )


def _rows(source: Random) -> list[Any]:
    return [_request(source) for _ in range(source.randrange(1, 9))]


def _plan_rows(rows: list[Any]) -> None:
    """Plan rows as a dataset's are; check that each is there once."""
    requests = []
    for number, row in enumerate(rows):
        try:
            requests.append(ColumnReader({})(row))
        except CtxreuseError:
            if number + 1 == len(rows) and not requests:
                raise
    contexts = contexts_of(requests, len)
    where = partition(contexts, 3).of(contexts).tolist()
    assert set(where) == set(range(max(where) + 1)), "a partition is empty"
    table = pa.table({"row": range(len(requests))})
    planned = planned_table(table, requests, ReusePlanner(), 0, 4)
    assert sorted(planned["row"].to_pylist()) == list(range(len(requests)))
    for row, order in zip(planned["row"], planned["plan_order"], strict=True):
        assert len(set(order.as_py())) <= len(requests[row.as_py()].unique_blocks)


TARGETS = {
    "plans": Target(_planning, _plan_all),
    "conversations": Target(_chat, _converse),
    "prompts": Target(_prompt, _plan_prompts),
    "sent edits": Target(_carried, _read_edit),
    "dataset rows": Target(_rows, _plan_rows),
}
