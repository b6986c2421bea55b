"""Taking back what was not answered may fail itself: the model's error is told all the same."""

from typing import Any

import pytest
from chain_helpers import SaysModel, question

from chain_of_agents import ChainOfAgents, ManagerError
from ctxreuse import ContextRequest, Plan, ReusePlanner
from ctxreuse.serving.pool.admission import AdmissionQueue, AdmissionSlot


class Forgetful(ReusePlanner):
    """A planner that cannot take anything back."""

    def forget(self, *_: Any, **__: Any) -> Any:
        raise LookupError("says: a text of a user's document")


async def test_an_admission_queue_counts_what_it_cannot_take_back():
    planner = Forgetful()
    queue = AdmissionQueue(planner, window_s=0)
    async with AdmissionSlot(queue, ContextRequest(["a text"], "Which?")) as plan:
        assert isinstance(plan, Plan)
        queue.forget(plan)
    assert queue.faults == planner.savings.planning_failures == 1


def test_a_manager_that_fails_is_the_error_of_the_question():
    def says(prompt: str) -> str:
        if prompt.startswith("Several readers have each"):
            raise ConnectionError("the engine is gone")
        return "A note."

    model = SaysModel(says=says)
    with pytest.raises(ManagerError) as caught:
        ChainOfAgents(model, planner=Forgetful()).invoke(question())
    causes = []
    error: BaseException | None = caught.value
    while error is not None:
        causes.append(type(error))
        error = error.__cause__ or error.__context__
    assert ConnectionError in causes
    assert LookupError not in causes
