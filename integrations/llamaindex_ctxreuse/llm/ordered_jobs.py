"""Sending a batch in the planned order, some prompts at a time, progress bar or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from ctxreuse.adapters.model_gateway import ModelGateway
from ctxreuse.adapters.ordered_release import OrderedQueue, Slot, planned_aside
from ctxreuse.adapters.prompt_planner import PlannedPrompt, Prompt
from ctxreuse.context.checks import checked_integer
from ctxreuse.serving.aio.gather import all_in_order


async def send_in_order(
    gateway: ModelGateway,
    prompts: Sequence[Prompt],
    send: Callable[[PlannedPrompt], Awaitable[Any]],
    *,
    workers: int,
    progress: str | None = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Return the answers to prompts that are planned together, in the order given.

    Args:
        gateway: Plans the prompts; is told which were not sent, or failed.
        prompts: The prompts.
        send: Sends one.
        workers: How many are sent at a time.
        progress: What the progress bar says; None shows none.
        return_exceptions: Whether a failed prompt's exception becomes its answer. Else the first
            one is raised, running calls are cancelled, and the others never start.

    Raises:
        InvalidRequestError: wrong type or out of range.
    """
    checked_integer("workers", workers, 1)
    planned = await planned_aside(lambda: gateway.plan_batch(prompts), len(prompts))
    queue: OrderedQueue[int, PlannedPrompt] = OrderedQueue(workers, unused=gateway.evict)
    slots = [Slot(queue, one.position, one) for one in planned]
    queue.line_up(slots)
    with tqdm(total=len(slots), desc=progress, disable=progress is None) as bar:

        async def answer(slot: Slot[int, PlannedPrompt]) -> Any:
            one = slot.take()
            assert one is not None, "a prompt of a batch is planned"
            try:
                with gateway.evict_on_failure(one):
                    result = await send(one)
            except Exception as error:
                if not return_exceptions:
                    raise
                result = error
            bar.update()
            return result

        answers = await all_in_order(slots, answer)
    by_position = {slot.item: one for slot, one in zip(slots, answers, strict=True)}
    return [by_position[position] for position in range(len(prompts))]
