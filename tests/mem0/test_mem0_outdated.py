"""Memories that were changed or deleted after a conversation has shown them."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from mem0_stores import FakeMemory, mem0_offline, memory

from ctxreuse import ContextBlock, ContextRequest, request_context
from ctxreuse.adapters import memories
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.errors import InvalidRequestError
from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory, tenant_of

ALICE = {"filters": {"user_id": "alice"}}
ANSWER = {"role": "assistant", "content": "Noted."}


class Store(FakeMemory):
    """Finds all that it has, unless `finds` says which; gets by id."""

    def __init__(self, **texts: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = texts
        self.finds: list[str] | None = None
        self.asked: list[str] = []
        self.relations: list[dict[str, str]] = []

    def search(self, query: str, **kwargs: Any) -> Any:
        names = list(self.texts) if self.finds is None else self.finds
        found = [memory(name, self.texts[name]) for name in names]
        self.found = {"results": found, "relations": self.relations}
        return super().search(query, **kwargs)

    def get(self, memory_id: str) -> Any:
        self.asked.append(memory_id)
        return memory(memory_id, self.texts[memory_id]) if memory_id in self.texts else None


class AsyncStore(Store):
    async def search(self, query: str, **kwargs: Any) -> Any:
        return super().search(query, **kwargs)

    async def get(self, memory_id: str) -> Any:
        return super().get(memory_id)


class Chat:
    """A conversation over a store, sync or async; one without a name keeps its messages only."""

    def __init__(self, store: Store, name: str | None = "c") -> None:
        self.name = name
        self.wrapped: Any = (
            AsyncReuseMemory(store) if isinstance(store, AsyncStore) else ReuseMemory(store)
        )
        self.history: list[dict[str, Any]] = []

    def ask(self, query: str) -> str:
        options: Any = {"history": self.history, "conversation_id": self.name, **ALICE}
        messages = self.wrapped.messages(query, **options)
        if not isinstance(messages, list):
            messages = asyncio.run(messages)
        self.history = [*messages, ANSWER]
        return str(messages[-1]["content"])


KINDS = pytest.mark.parametrize("kind", [Store, AsyncStore])


@KINDS
def test_a_changed_memory_is_said_to_be_replaced(kind: Any) -> None:
    store = kind(home="Alice lives in Porto.", cats="Alice has two cats.")
    chat = Chat(store)
    chat.ask("Where?")
    store.texts["home"] = "Alice lives in Lisbon."
    assert chat.ask("And now?") == (
        "[Doc_3] Alice lives in Lisbon.\n\n[Doc_3] replaces [Doc_1].\n\n"
        "Please refer to [Doc_2] in the previous conversation.\n\nAnd now?"
    )
    assert store.asked == []


@KINDS
def test_a_memory_that_was_changed_and_is_not_found_holds_no_longer(kind: Any) -> None:
    store = kind(home="Alice lives in Porto.", cats="Alice has two cats.")
    chat = Chat(store)
    chat.ask("Where?")
    store.texts["home"] = "Alice lives in Lisbon."
    store.finds = ["cats"]
    assert chat.ask("And?").startswith("[Doc_1] no longer holds; do not use it.\n\n")
    store.finds = None
    assert "[Doc_3] Alice lives in Lisbon." in chat.ask("Where?")


@KINDS
def test_a_deleted_memory_is_not_shown_as_valid(kind: Any) -> None:
    store = kind(pin="The PIN is 4711.", cats="Alice has two cats.")
    chat = Chat(store)
    chat.ask("Where?")
    del store.texts["pin"]
    assert chat.ask("And?").startswith("[Doc_1] no longer holds; do not use it.\n\n")
    assert "no longer holds" not in chat.ask("And?"), "once is enough"
    assert set(store.asked) == {"pin"}
    store.texts.clear()
    assert chat.ask("Well?") == "[Doc_2] no longer holds; do not use it.\n\nWell?"


@KINDS
def test_a_conversation_without_a_name_is_told_as_well(kind: Any) -> None:
    """As a service has it that gets all messages with each request."""
    store = kind(
        home="Alice lives in Porto.", pin="The PIN is 4711.", cats="Alice has\n\ntwo cats."
    )
    chat = Chat(store, None)
    chat.ask("Where?")
    store.texts["home"] = "Alice lives in Lisbon."
    del store.texts["pin"]
    assert chat.ask("And?") == (
        "[Doc_2] no longer holds; do not use it.\n\n[Doc_4] Alice lives in Lisbon.\n\n"
        "[Doc_4] replaces [Doc_1].\n\n[Doc_5] Alice has\n\ntwo cats.\n\nAnd?"
    )
    assert "holds" not in chat.ask("And?"), "once is enough"
    store.finds = []
    store.texts["cats"] = "Alice has three cats."
    said = chat.ask("Well?")
    assert all(f"[Doc_{number}] no longer holds" in said for number in (3, 5, 7))
    assert "[Doc_4] no" not in said


def test_another_tenants_history_is_not_known() -> None:
    store = Store(home="Alice lives in Porto.")
    wrapped = ReuseMemory(store)
    history = [*wrapped.messages("Where?", **ALICE), ANSWER]
    del store.texts["home"]
    bob: Any = {"filters": {"user_id": "bob"}}
    assert wrapped.messages("And?", history=history, **bob)[-1]["content"] == "And?"
    assert store.asked == []


def test_memories_are_looked_for_in_a_long_history_with_bounded_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = memories.KnownMemories()
    known.add("", [ContextBlock(text="Alice lives in Porto.")])
    hashed = []
    monkeypatch.setattr(memories, "text_digest", lambda text: hashed.append(len(text)) or b"")
    labels = "[Doc_1] " * 2_400
    texts = ["[Doc_1] " * 100_000, "\n\n".join([labels] * 40), "[Doc_1] a\n\n" * 100_000]
    for text in texts:
        hashed.clear()
        known.standing_in("", [{"role": "user", "content": text}], DEFAULT_TEMPLATES)
        assert sum(hashed) <= 16 * len(text) + (1 << 20)


@pytest.mark.parametrize("name", [None, "c"])
def test_a_history_of_which_nothing_is_known_is_logged_once(
    name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    memories.log_unknown_history.cache_clear()
    store = Store(home="Alice lives in Porto.")
    history = [*ReuseMemory(store).messages("Where?", conversation_id=name, **ALICE), ANSWER]
    plain: Any = [{"role": "user", "content": "Hello."}, ANSWER]
    wrapped = ReuseMemory(store)
    store.finds = []
    wrapped.messages("And?", history=plain, conversation_id=name and "d", **ALICE)
    assert caplog.records == []
    for _ in range(2):
        wrapped.messages("And?", history=history, conversation_id=name, **ALICE)
    [record] = caplog.records
    assert "another process or another wrapper" in record.message


@KINDS
def test_a_history_of_which_all_is_known_is_not_logged(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memories.log_unknown_history.cache_clear()
    chat = Chat(kind(home="Alice lives in Porto."))
    chat.ask("Where?")
    chat.ask("And?")
    assert caplog.records == []


@KINDS
def test_what_stands_and_holds_is_left_alone(kind: Any) -> None:
    store = kind(home="Alice lives in Porto.", cats="Alice has two cats.")
    chat = Chat(store)
    chat.ask("Where?")
    store.finds = ["cats"]
    assert chat.ask("And?") == "Please refer to [Doc_2] in the previous conversation.\n\nAnd?"


@KINDS
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_store_that_fails_says_nothing_and_one_that_does_not_find_does(
    kind: Any, is_gone: bool
) -> None:
    class MemoryNotFoundError(Exception):
        pass

    store = kind(home="Alice lives in Porto.", cats="Alice has two cats.")
    chat = Chat(store)
    chat.ask("Where?")
    store.finds = ["cats"]

    def fail(memory_id: str) -> Any:
        raise MemoryNotFoundError if is_gone else ConnectionError("no")

    store.get = fail
    assert ("no longer holds" in chat.ask("And?")) == is_gone
    assert chat.wrapped.faults == (0 if is_gone else 1)


@KINDS
def test_a_forgotten_memory_leaves_the_messages(kind: Any) -> None:
    store = kind(pin="The PIN is 4711.", cats="Alice has two cats.")
    chat = Chat(store)
    chat.ask("Where?")
    del store.texts["pin"]
    cleaned = chat.wrapped.forget(["pin"], chat.history, conversation_id="c", **ALICE)
    assert "4711" not in str(cleaned)
    assert "[Doc_1] (removed)\n\n[Doc_2] Alice has two cats." in cleaned[0]["content"]
    with request_context(conversation_id="c"):
        assert chat.wrapped.forget(["pin"], chat.history, **ALICE) == cleaned
    assert chat.wrapped.forget(["pin"], chat.history, conversation_id="c") == chat.history
    with pytest.raises(InvalidRequestError, match="give the conversation_id"):
        chat.wrapped.forget(["pin"], chat.history, **ALICE)
    chat.history = cleaned
    assert "no longer" not in chat.ask("And?")


@KINDS
def test_what_others_have_shown_in_the_conversation_is_not_looked_up(kind: Any) -> None:
    """A document of a retriever, and a graph's relations, are no memories of the store."""
    store = kind(cats="Alice has two cats.")
    chat = Chat(store)
    document = ContextBlock(id="doc-7", text="Porto lies on the Douro.")
    request = ContextRequest(
        [document], history=[], conversation_id="c", tenant=tenant_of(ALICE["filters"])
    )
    chat.history = [*chat.wrapped.planner.plan(request).messages(), ANSWER]
    relations = [{"source": "alice", "relationship": "has", "destination": "cats"}]
    with patch.object(store, "relations", relations):
        assert "[Doc_3] alice -- has -- cats" in chat.ask("Which?")
    assert "no longer holds" not in chat.ask("And?")
    assert store.asked == []
    assert chat.wrapped.parts["known_memories"].entries == 1


def test_mem0_itself_is_asked() -> None:
    from mem0 import Memory

    store = mem0_offline(Memory)
    for fact in ("Alice lives in Porto.", "The PIN is 4711."):
        store.add(fact, user_id="alice", infer=False)
    wrapped = ReuseMemory(store)
    options: Any = {"conversation_id": "c", "threshold": 0, **ALICE}
    first = wrapped.messages("Where?", **options)
    ids = {one["memory"]: one["id"] for one in wrapped.memory.get_all(**ALICE)["results"]}
    wrapped.update(ids["Alice lives in Porto."], "Alice lives in Lisbon.")
    wrapped.delete(ids["The PIN is 4711."])
    said = wrapped.messages("And?", history=[*first, ANSWER], **options)[-1]["content"]
    label = "[Doc_1]" if "[Doc_1] The PIN" in first[0]["content"] else "[Doc_2]"
    other = "[Doc_2]" if label == "[Doc_1]" else "[Doc_1]"
    assert said == (
        f"{label} no longer holds; do not use it.\n\n[Doc_3] Alice lives in Lisbon.\n\n"
        f"[Doc_3] replaces {other}.\n\nAnd?"
    )
