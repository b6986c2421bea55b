"""Arguments of the wrong kind are named, with their values and the remedy."""

import pytest

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.errors import InvalidRequestError


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


REQUEST = ContextRequest([ContextBlock(id="a", text="one"), "two"], "which?")


@pytest.mark.parametrize("depth", [500, 5_000, 100_000])
def test_a_history_that_nests_too_deeply_says_so(depth):
    history = [{"role": "user", "content": nested(depth)}]
    with pytest.raises(InvalidRequestError) as caught:
        ContextRequest(["one"], history=history)
    assert str(caught.value) == (
        "a chat message's 'content' (str) is nested too deeply and cannot be copied "
        "(RecursionError); pass strings, lists and dicts of them"
    )


BUILD_ONE = "build one with ContextRequest(blocks=[...], query='...')"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda planner: planner.plan({"blocks": []}),
            f"a request must be a ContextRequest, not {{'blocks': []}} (dict); {BUILD_ONE}",
        ),
        (
            lambda planner: planner.plan_batch([REQUEST, None]),
            "a request at position 1 must be a ContextRequest, not None (NoneType); " + BUILD_ONE,
        ),
        (
            lambda planner: planner.plan_batch(7),
            "requests must be a list of ContextRequest, not 7 (int); use plan() for a single one",
        ),
        (lambda planner: planner.evict("r-1"), "request_ids must be a list of ids, not 'r-1' (str"),
        (lambda planner: planner.note_edit("", ["a"], b""), "each of messages must be bytes, not"),
        (lambda planner: planner.evict_tokens(-1), "tokens must be an integer from 0, not -1 (int"),
        (lambda _: ReusePlanner(alpha=float("nan")), "alpha must be a number from 0, not nan (flo"),
        (lambda _: ReusePlanner(capacity_tokens=-1), "capacity_tokens must be an integer from 0 o"),
        (
            lambda _: ReusePlanner(templates={}),
            "templates must be ctxreuse.Templates, not {} (dict",
        ),
        (lambda _: ReusePlanner(token_counter=4), "token_counter must be a function or a tokenize"),
        (lambda planner: planner.trim(None, 1), "request_id must be a string or an integer, not"),
        (lambda planner: planner.end_conversation([]), "conversation_id must be a string or an in"),
        (lambda planner: planner.end_conversation("c", 1), "tenant must be a string, not 1 (int)"),
        (lambda _: ReusePlanner(annotate="no"), "annotate must be True, False or None, not 'no'"),
        (lambda _: ReusePlanner(keep_best=1), "keep_best must be True or False, not 1"),
        (lambda planner: planner.count_tokens(b"x"), "text must be a string, not b'x' (bytes)"),
        (lambda planner: planner.block_tokens(["x"]), "an entry of blocks must be a ContextBlock,"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_with_its_value(call, message, planner):
    with pytest.raises(InvalidRequestError) as caught:
        call(planner)
    assert str(caught.value).startswith(message)
    assert planner.statistics().requests == 0


def test_settings_are_given_by_name():
    with pytest.raises(InvalidRequestError, match="capacity_tokens=100_000"):
        ReusePlanner(100_000)
