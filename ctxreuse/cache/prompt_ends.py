"""At which token of a prompt each context block ends."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from ctxreuse.context.checks import check_function, checked_kind, checked_list
from ctxreuse.context.content_parts import turn_parts
from ctxreuse.context.rendering import message_texts
from ctxreuse.context.tokens import as_token_counter, well_formed
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planning.plan import Plan

_TEMPLATE_TOKENS = 64
_EXACT_ENDS = 64


def block_ends(
    plan: Plan, tokenizer: Any, render: Callable[[list[dict[str, Any]]], str] | None = None
) -> list[int]:
    """Return where each block of a plan ends in its prompt, in tokens.

    Exact where the tokenizer tells where its tokens begin, and else for the first 64 blocks; later
    ends may be a few tokens too late.

    Args:
        plan: The plan that is sent.
        tokenizer: The model's tokenizer (of `tokenizers` or `transformers`), or a function from a
            text to its number of tokens.
        render: From chat messages to the prompt's text; None takes the tokenizer's own chat
            template.

    Returns:
        For each of `plan.blocks` the number of tokens from the prompt's start to the block's end.

    Raises:
        InvalidRequestError: there is no chat template, or it changes the message's text.

    Example:
        >>> from ctxreuse import ContextRequest, ReusePlanner
        >>> planner = ReusePlanner(labels=True)
        >>> plan = planner.plan(ContextRequest(["one two", "three"], "four?"))
        >>> words = lambda text: len(text.split())
        >>> block_ends(plan, words, render=lambda messages: messages[0]["content"])
        [3, 5]
    """
    checked_kind("plan", plan, Plan, "a Plan; planner.plan(...) returns one")
    count = as_token_counter(tokenizer)
    check_function("render", render, "a function from messages to text, or None")
    if render is None:
        render = _chat_template(tokenizer)
    text, content = well_formed(render(plan.messages())), well_formed(plan.content)
    start = text.rfind(content)
    if start < 0:  # templates often strip a message
        stripped = content.strip()
        start = text.rfind(stripped) - content.find(stripped)
    if start < 0 or not content:
        raise InvalidRequestError(
            "the rendered prompt does not hold the plan's message as it is; "
            "pass render=..., or leave block_ends out to have them estimated"
        )
    ends = [start + end for end in character_ends(plan)]
    found = _ends_by_offsets(tokenizer, text, ends)
    if found is not None:
        return found
    exact = [count(text[:end]) for end in ends[:_EXACT_ENDS]]
    behind = ends[_EXACT_ENDS - 1 :]
    more = (count(text[start:end]) for start, end in pairwise(behind))
    return [*exact[:-1], *accumulate(more, initial=exact[-1])] if exact else []


def _ends_by_offsets(tokenizer: Any, text: str, ends: Sequence[int]) -> list[int] | None:
    """Return how many tokens begin before each end; None if the tokenizer does not tell."""
    if getattr(tokenizer, "is_fast", False) is True:  # of transformers
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
    elif hasattr(tokenizer, "encode_batch"):  # of tokenizers; others' `encode` gives bare numbers
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    else:
        return None
    # tokens of no width stand for no text: padding, or a space that the tokenizer has put in
    visible = [number for number, (start, stop) in enumerate(offsets) if stop > start]
    starts = [offsets[number][0] for number in visible]
    if starts != sorted(starts):
        return None
    before = [bisect_left(starts, end) for end in ends]
    return [visible[count - 1] + 1 if count else 0 for count in before]


def estimated_ends(plan: Plan, prompt_tokens: int) -> list[int]:
    """Estimate where each block of a plan ends, in tokens, rather too late than too early."""
    messages = plan.messages()
    before = sum(len(text) for message in messages[:-1] for text in message_texts(message))
    ends = [before + end for end in character_ends(plan)]
    return _in_tokens(ends, before + len(plan.content), prompt_tokens)


def ends_in_texts(blocks: Sequence[str], texts: Sequence[str], prompt_tokens: int) -> list[int]:
    """Estimate where blocks end that stand in a prompt's texts in this order, as above."""
    whole, ends = "".join(texts), [0]
    for block in blocks:
        at = whole.find(block, ends[-1])
        ends.append(ends[-1] if at < 0 else at + len(block))
    return _in_tokens(ends[1:], max(1, len(whole)), prompt_tokens)


def _in_tokens(ends: Sequence[int], characters: int, prompt_tokens: int) -> list[int]:
    """Return ends in tokens, as if all characters took equally many, behind a template's."""
    template = min(prompt_tokens, _TEMPLATE_TOKENS)
    shown = prompt_tokens - template
    return [template - (-shown * end // characters) for end in ends]


def character_ends(plan: Plan) -> list[int]:
    """Return where each block of a plan ends in `plan.content`, in characters."""
    parts = turn_parts(plan.parts, None, "", plan.templates, (), is_labelled=plan.is_labelled)
    ends = accumulate(len(part.text) for part in parts)
    return [end for part, end in zip(parts, ends, strict=True) if part.block is not None]


def checked_ends(ends: Sequence[int], blocks: int) -> list[int]:
    """Return ends as a list, if they are one ascending integer a block."""
    listed = checked_list("block_ends", ends, "a list of integers")
    if len(listed) != blocks or not all(isinstance(end, int) for end in listed):
        raise InvalidRequestError(
            f"block_ends must hold an integer for each of the {blocks} blocks, not {describe(ends)}"
        )
    if listed != sorted(listed):
        raise InvalidRequestError(f"block_ends must ascend, unlike {describe(ends)}")
    return listed


def _chat_template(tokenizer: Any) -> Callable[[list[dict[str, Any]]], str]:
    template = getattr(tokenizer, "apply_chat_template", None)
    if not callable(template):
        raise InvalidRequestError(
            f"{describe(tokenizer)} has no chat template; pass render=..., a function from chat "
            "messages to the prompt's text"
        )

    def render(messages: list[dict[str, Any]]) -> str:
        shown = [
            {
                name: well_formed(value) if isinstance(value, str) else value
                for name, value in message.items()
            }
            for message in messages
        ]
        return str(template(shown, tokenize=False, add_generation_prompt=True))

    return render
