import asyncio
import contextvars
import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning_helpers import user

from ctxreuse.context.scope import NO_SCOPE, RequestScope, current_scope, request_context
from ctxreuse.errors import InvalidRequestError

HELLO = (user("Hello."),)
settings = st.fixed_dictionaries(
    {},
    optional={
        "tenant": st.sampled_from(("", "a", "b")),
        "conversation_id": st.sampled_from(("c", "d", 0, 1, "1")),
        "history": st.sampled_from(((), HELLO, (user("Hi."), user("Ho.")))),
    },
)


async def test_what_is_said_holds_inside_across_awaits_and_only_there():
    with request_context(tenant="a", conversation_id="c", history=HELLO) as scope:
        assert scope == RequestScope("a", "c", HELLO)
        assert current_scope() is scope
    assert current_scope() is NO_SCOPE
    with request_context(tenant="a"):
        await asyncio.sleep(0)
        assert current_scope() == RequestScope("a")
    assert current_scope() is NO_SCOPE
    assert (NO_SCOPE.tenant, NO_SCOPE.conversation_id, NO_SCOPE.history) == (None, None, None)


@given(st.lists(settings, max_size=6))
def test_inner_scopes_hold_what_they_say_and_leave_the_outer_ones_as_they_were(nested):
    def enter(level):
        before = current_scope()
        if level < len(nested):
            with request_context(**nested[level]) as scope:
                for name, value in nested[level].items():
                    assert getattr(scope, name) == value
                enter(level + 1)
                assert current_scope() is scope
        assert current_scope() is before

    enter(0)


@example([{"conversation_id": "c", "history": HELLO}, {"conversation_id": "c"}])
@given(st.lists(settings, min_size=2, max_size=6))
def test_nothing_of_another_tenant_or_conversation_is_inherited(nested):
    scope = NO_SCOPE
    for said in nested:
        outer, scope = scope, scope.inside(**said)
        same_tenant = outer.tenant in (None, scope.tenant)
        same_conversation = same_tenant and outer.conversation_id in (None, scope.conversation_id)
        if "tenant" not in said:
            assert scope.tenant == outer.tenant
        if "conversation_id" not in said:
            assert scope.conversation_id == (outer.conversation_id if same_tenant else None)
        if "history" not in said:
            assert scope.history == (outer.history if same_conversation else None)


def test_a_scope_is_a_frozen_value_that_is_said_at_once_or_one_after_the_other():
    said = [{"tenant": "a"}, {"conversation_id": "c"}, {"history": HELLO}]
    for first, second, third in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        scope = NO_SCOPE.inside(**said[first]).inside(**said[second]).inside(**said[third])
        assert scope == RequestScope("a", "c", HELLO)

    scope = RequestScope("a", "c", HELLO)
    assert scope.inside(tenant="b") == RequestScope("b")
    assert scope == RequestScope("a", "c", HELLO)
    with pytest.raises(FrozenInstanceError):
        scope.tenant = "b"


def test_the_history_is_any_iterable_and_copied():
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]
    with request_context(history=messages) as scope:
        messages[0]["content"][0]["text"] = "changed"
        messages.append(user("more"))
        assert scope.history == (user([{"type": "text", "text": "Hello."}]),)
    with request_context(history=(message for message in HELLO)) as scope:
        assert scope.history == HELLO


@pytest.mark.parametrize("kind", [LookupError, KeyboardInterrupt, asyncio.CancelledError])
def test_an_exception_passes_and_ends_the_scope(kind):
    error = kind("inside")
    with request_context(tenant="a"):
        with pytest.raises(kind) as caught, request_context(tenant="b", conversation_id="c"):
            raise error
        assert caught.value is error
        assert current_scope() == RequestScope("a")
    assert current_scope() is NO_SCOPE


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tenant": 3}, "tenant must be a string, not 3 (int)"),
        ({"conversation_id": 1.5}, "conversation_id must be a string or an integer, not 1.5 (fl"),
        ({"history": [1]}, "a chat message in history must be a dict with 'role' and 'content', "),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(said, message):
    with request_context(tenant="a") as scope:
        with pytest.raises(InvalidRequestError) as caught, request_context(**said):
            raise AssertionError("the code inside must not run")
        assert str(caught.value).startswith(message)
        assert current_scope() is scope


async def test_concurrent_tasks_each_have_their_own_scope():
    async def serve(number):
        seen = []
        with request_context(tenant=f"t{number}", conversation_id=number):
            for _ in range(5):
                await asyncio.sleep(0)
                seen.append(current_scope())
            with request_context(tenant="inner"):
                await asyncio.sleep(0)
                seen.append(current_scope())
            await asyncio.sleep(0)
            seen.append(current_scope())
        seen.append(current_scope())
        return seen

    with request_context(tenant="outer") as outer:
        answers = await asyncio.gather(*(serve(number) for number in range(8)))
        assert current_scope() is outer
    for number, seen in enumerate(answers):
        own = RequestScope(f"t{number}", number)
        assert seen == [*[own] * 5, RequestScope("inner"), own, outer]


def streamed():
    """A generator that serves a request and hands out its scope as it goes."""
    with request_context(tenant="streamed") as scope:
        while True:
            yield scope


async def streamed_later():
    with request_context(tenant="streamed") as scope:
        while True:
            yield scope


@pytest.mark.parametrize("outside", [None, "a"])
def test_a_generator_may_be_closed_in_another_context_and_leaves_that_as_it_is(outside):
    with request_context(tenant=outside) as before:
        stream = streamed()
        elsewhere = contextvars.copy_context()
        assert elsewhere.run(next, stream) == RequestScope("streamed")
        assert current_scope() is before
        stream.close()
        assert current_scope() is before
        with request_context(tenant="b"):
            assert current_scope() == RequestScope("b")
        assert current_scope() is before


async def test_an_async_generator_that_is_given_up_ends_without_a_word():
    said = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))

    async def serve():
        async for scope in streamed_later():
            said.append(scope)
            break

    await asyncio.create_task(serve())
    gc.collect()
    await asyncio.get_running_loop().shutdown_asyncgens()
    assert (said, current_scope()) == ([RequestScope("streamed")], NO_SCOPE)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_an_error_thrown_in_from_another_context_is_not_swallowed(kind):
    stream = streamed()
    contextvars.copy_context().run(next, stream)
    error = kind("inside")
    with pytest.raises(kind) as caught:
        stream.throw(error)
    assert caught.value is error
    assert current_scope() is NO_SCOPE


async def test_a_thread_sees_the_scope_only_if_it_copies_the_context_as_those_of_asyncio_do():
    with request_context(tenant="a") as scope, ThreadPoolExecutor(1) as pool:
        copied = contextvars.copy_context()
        assert pool.submit(copied.run, current_scope).result() is scope
        assert pool.submit(current_scope).result() is NO_SCOPE

    def serve():
        with request_context(conversation_id="c") as scope:
            return scope

    with request_context(tenant="a") as outer:
        assert await asyncio.to_thread(serve) == RequestScope("a", "c")
        assert current_scope() is outer
