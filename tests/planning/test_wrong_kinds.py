"""Anything in any argument of the public functions: an error of ours, or an answer."""

import inspect

import pytest

from ctxreuse import (
    ContextBlock,
    ContextRequest,
    CtxreuseError,
    ReusePlanner,
    Templates,
    request_context,
)
from ctxreuse.cache import BlockLevelCache, PrefixCacheMetrics, PrefixCacheSimulator
from ctxreuse.distance import context_distance
from ctxreuse.errors import InvalidRequestError


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def generated():
    yield object()


def wrong_values():
    """Return values of every kind; generators are new ones."""
    deep = nested(2_000)
    return [
        *(None, True, 0, -1, 3, 10**400, -(10**400), 1.5, float("nan"), float("inf")),
        *("", "text", "\ud800", b"bytes", object(), object, print),
        *([], [None], [1], ["a"], [[]], [{}], (), {}, {"a": 1}, {1: 2}, set(), {"a"}),
        *(deep, {"role": "user", "content": deep}, [{"role": "user", "content": deep}]),
        *([{"role": 1}], [{"content": None}], [{"content": generated()}], generated()),
        *(ContextBlock(text="t"), [ContextBlock(text="t")], ContextRequest(["t"])),
    ]


REQUEST = ContextRequest([ContextBlock(id="a", text="one"), "two"], "which?")


def planned(**arguments):
    planner = ReusePlanner()
    request = ContextRequest(**({"blocks": ["one", "two"]} | arguments))
    planner.plan(request).messages()
    planner.preview(request)
    planner.plan_batch([request, REQUEST])
    return planner.plan(request).explain()


def conversed(conversation_id="c", tenant="", system=None, blocks=("one",), query="", **last):
    chat = ReusePlanner().conversation(conversation_id, tenant, system)
    chat.plan(blocks, query, request_id=last.get("request_id"))
    chat.record(last.get("answer", "yes"))
    chat.compact(last.get("summary", "it was so"))
    return chat.messages()


def said(**fields):
    return planned(history=[{"role": "user", "content": "so"} | fields], conversation_id="c")


def entered(**arguments):
    with request_context(**arguments):
        pass


def used_planner():
    planner = ReusePlanner()
    planner.plan(REQUEST)
    return planner


def simulated(tokens=range(40), salt="", generated=(), uncomputed=0, room_for=9):
    cache = PrefixCacheSimulator(1_000, 4)
    cache.serve(tokens, salt, generated=generated)
    cache.finish(cache.start(range(10), room_for=room_for), (), uncomputed=uncomputed)


OF_PLANNERS = {
    "plan": {"request": REQUEST},
    "preview": {"request": REQUEST},
    "plan_batch": {"requests": [REQUEST]},
    "evict": {"request_ids": []},
    "evict_tokens": {"tokens": 1},
    "trim": {"request_id": "a", "blocks": 1},
    "count_tokens": {"text": "t"},
    "block_tokens": {"blocks": []},
    "cached_tokens": {"request": REQUEST},
    "end_conversation": {"conversation_id": "c"},
}
OF_TEMPLATES = {"order_tokens": {"number": 3}, "outdated_annotation": {"old": "[BCDF]"}}


def of(made, name):
    return lambda **arguments: getattr(made(), name)(**arguments)


def parameters(function, first=0):
    return list(inspect.signature(function).parameters)[first:]


CALLS = {
    "ContextBlock": (ContextBlock, {"text": "t"}, ["text", "id", "tokens"]),
    "ContextRequest": (planned, {}, parameters(ContextRequest)),
    "Templates": (Templates, {}, parameters(Templates)),
    "request_context": (entered, {}, parameters(request_context)),
    "ReusePlanner": (ReusePlanner, {}, parameters(ReusePlanner, 1)),
    **{
        name: (of(used_planner, name), given, parameters(getattr(ReusePlanner, name), 1))
        for name, given in OF_PLANNERS.items()
    },
    **{
        f"Templates.{name}": (of(Templates, name), OF_TEMPLATES.get(name, {}), parameters(one, 1))
        for name, one in vars(Templates).items()
        if inspect.isfunction(one) and not name.startswith("_")
    },
    "conversation": (conversed, {}, [*parameters(conversed)[:-1], "answer", "summary"]),
    "a message": (said, {}, ["role", "content", "tool_calls", "name"]),
    "context_distance": (
        context_distance,
        {"ids_a": ["a"], "ids_b": ["a"]},
        parameters(context_distance),
    ),
    "BlockLevelCache": (BlockLevelCache, {}, ["capacity_tokens"]),
    "BlockLevelCache.serve": (
        of(lambda: BlockLevelCache(9), "serve"),
        {"blocks": [b"k"], "tokens": [3]},
        ["blocks", "tokens", "group"],
    ),
    "PrefixCacheSimulator": (simulated, {}, parameters(simulated)),
    "PrefixCacheSimulator.fits": (
        of(lambda: PrefixCacheSimulator(9), "fits"),
        {"prompt_tokens": 1},
        ["prompt_tokens", "answer_tokens"],
    ),
    "parse": (PrefixCacheMetrics.parse, {}, ["text"]),
}


@pytest.mark.parametrize(
    ("call", "parameter"),
    [(name, parameter) for name, (_, _, names) in CALLS.items() for parameter in names],
)
def test_anything_in_any_argument_is_an_answer_or_an_error_that_names_it(call, parameter):
    function, arguments, _ = CALLS[call]
    for value in wrong_values():
        try:
            function(**arguments | {parameter: value})
        except CtxreuseError as error:
            message = str(error)
            assert len(message) < 400
            assert "\n" not in message
            assert not isinstance(value, str) or value in ("", "text", "\ud800")


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
        (lambda planner: planner.evict_tokens(-1), "tokens must be an integer from 0, not -1 (int"),
        (lambda _: ReusePlanner(alpha=float("nan")), "alpha must be a number from 0, not nan (flo"),
        (lambda _: ReusePlanner(alpha=float("inf")), "alpha must be a number from 0, not inf (flo"),
        (lambda _: ReusePlanner(capacity_tokens=-1), "capacity_tokens must be an integer from 0 o"),
        (
            lambda _: ReusePlanner(templates={}),
            "templates must be ctxreuse.Templates, not {} (dict",
        ),
        (lambda _: ReusePlanner(token_counter=4), "token_counter must be a function or a tokenize"),
        (lambda planner: planner.trim(None, 1), "request_id must be a string or an integer, not"),
        (lambda planner: planner.trim("a", 1.5), "blocks must be an integer from 0, not 1.5"),
        (lambda planner: planner.end_conversation([]), "conversation_id must be a string or an in"),
        (lambda planner: planner.end_conversation("c", 1), "tenant must be a string, not 1 (int)"),
        (lambda planner: planner.evict([], 1), "tenant must be a string, not 1 (int)"),
        (lambda planner: planner.trim("a", 0, 1), "tenant must be a string, not 1 (int)"),
        (lambda planner: planner.preview("text"), "a request must be a ContextRequest, not 'text'"),
        (lambda _: ReusePlanner(annotate="no"), "annotate must be True, False or None, not 'no'"),
        (lambda _: ReusePlanner(keep_best=1), "keep_best must be True or False, not 1"),
        (lambda planner: planner.count_tokens(b"x"), "text must be a string, not b'x' (bytes)"),
        (lambda planner: planner.block_tokens("x"), "blocks must be a list of ContextBlock, not"),
        (lambda planner: planner.block_tokens(["x"]), "an entry of blocks must be a ContextBlock,"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_with_its_value(call, message, planner):
    with pytest.raises(InvalidRequestError) as caught:
        call(planner)
    assert str(caught.value).startswith(message)
    assert planner.statistics().requests == 0


def test_blocks_and_a_question_without_a_request_are_told_where_they_go():
    wrong = ["Rome is in Italy.", "The Tiber flows through Rome."]
    question = "Where is Rome?"
    for plan in (ReusePlanner().plan, ReusePlanner().plan_batch):
        with pytest.raises(InvalidRequestError, match=r"ContextRequest\(blocks=\[\.\.\.\], query="):
            plan(wrong, question)


def test_settings_are_given_by_name():
    with pytest.raises(InvalidRequestError, match="capacity_tokens=100_000"):
        ReusePlanner(100_000)
