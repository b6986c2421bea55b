"""Memories that were changed or deleted after a conversation has shown them."""

import asyncio
from typing import Any

import pytest
from block_labels import label, labelled, located
from mem0_stores import AsyncStore, Store

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner, request_context
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from ctxreuse.pipeline import memories
from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory, tenant_of

ALICE = {"filters": {"user_id": "alice"}}
ANSWER = {"role": "assistant", "content": "Noted."}


class Chat:
    """A conversation over a store, sync or async; one without a name keeps its messages only."""

    def __init__(self, store: Store, name: str | None = "c", **options: Any) -> None:
        self.name = name
        self.wrapped: Any = (
            AsyncReuseMemory(store, **options)
            if isinstance(store, AsyncStore)
            else ReuseMemory(store, **options)
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
NAMES = pytest.mark.parametrize("name", [None, "c"])
PIN_IS_GONE = '"The PIN is 4711." no longer holds; do not use it.'
HOME_HAS_CHANGED = '"Alice lives in Porto." no longer holds; do not use it.'


@NAMES
@KINDS
def test_a_changed_memory_that_stands_without_a_label_is_quoted(kind, name):
    store = kind(home="Alice lives in Porto.", cats="Alice has two cats and a dog.")
    chat = Chat(store, name)
    assert chat.ask("Where?") == (
        "Alice lives in Porto.\n\nAlice has two cats and a dog.\n\nWhere?"
    )
    store.texts["home"] = "Alice lives in Lisbon."
    assert chat.ask("And now?") == f"{HOME_HAS_CHANGED}\n\nAlice lives in Lisbon.\n\nAnd now?"
    assert chat.ask("Where?") == "Where?", "once is enough"
    store.texts["home"] = "Alice lives in Porto."
    assert chat.ask("And now?") == (
        '"Alice lives in Lisbon." no longer holds; do not use it.\n\nAlice lives in Porto.\n\n'
        "And now?"
    ), "what was said not to hold is shown anew when it holds again"
    store.texts["home"] = "Alice lives in Lisbon."
    assert chat.ask("And now?") == f"{HOME_HAS_CHANGED}\n\nAlice lives in Lisbon.\n\nAnd now?"
    assert store.asked == []


@pytest.mark.parametrize("labels", [False, True])
@KINDS
def test_a_deleted_memory_is_not_shown_as_valid(kind, labels):
    store = kind(pin="PIN: 4711", cats="Alice has two cats.")
    chat = Chat(store, labels=labels)
    chat.ask("Where?")
    pin, cats = (label(text) if labels else f'"{text}"' for text in store.texts.values())
    del store.texts["pin"]
    assert chat.ask("And?").startswith(f"{pin} no longer holds; do not use it.\n\n")
    assert "no longer holds" not in chat.ask("And?"), "once is enough"
    assert set(store.asked) == {"pin"}
    store.texts.clear()
    assert chat.ask("Well?") == f"{cats} no longer holds; do not use it.\n\nWell?"


@KINDS
def test_a_conversation_without_a_name_is_told_as_well(kind):
    """As a service has it that gets all messages with each request."""
    store = kind(
        home="Alice lives in Porto.", pin="The PIN is 4711.", cats="Alice has\n\ntwo cats."
    )
    chat = Chat(store, None, labels=True, growth_limit=None)
    chat.ask("Where?")
    home, pin, cats = map(label, store.texts.values())
    lisbon = store.texts["home"] = "Alice lives in Lisbon."
    del store.texts["pin"]
    assert chat.ask("And?") == (
        f"{pin} no longer holds; do not use it.\n\n{labelled(lisbon)}\n\n"
        f"{label(lisbon)} replaces {home}.\n\nSee also {cats} above.\n\nAnd?"
    )
    assert "holds" not in chat.ask("And?"), "once is enough"
    store.finds = []
    store.texts["cats"] = "Alice has three cats."
    assert chat.ask("Well?") == f"{cats} no longer holds; do not use it.\n\nWell?"


@NAMES
@KINDS
def test_memories_of_several_paragraphs_are_quoted_in_a_line(kind, name):
    store = kind(
        home="Alice lives in Porto.", pin="The PIN is 4711.", cats="Alice has\n\ntwo cats."
    )
    chat = Chat(store, name, growth_limit=None)
    chat.ask("Where?")
    store.texts["home"] = "Alice lives in Lisbon."
    del store.texts["pin"]
    assert chat.ask("And?") == (
        f"{HOME_HAS_CHANGED}\n\n{PIN_IS_GONE}\n\nAlice lives in Lisbon.\n\nAnd?"
    )
    assert "holds" not in chat.ask("And?"), "once is enough"
    store.finds = []
    store.texts["cats"] = "Alice has three cats. " * 10
    assert chat.ask("Well?") == '"Alice has two cats." no longer holds; do not use it.\n\nWell?'
    store.finds = ["cats"]
    assert "no longer" not in chat.ask("How many?")
    del store.texts["cats"]
    store.finds = []
    assert chat.ask("Well?") == (
        f'"{("Alice has three cats. " * 10)[:100]}..." no longer holds; do not use it.\n\nWell?'
    )


def test_another_tenants_history_is_not_known():
    store = Store(home="Alice lives in Porto.")
    wrapped = ReuseMemory(store)
    history = [*wrapped.messages("Where?", **ALICE), ANSWER]
    del store.texts["home"]
    bob: Any = {"filters": {"user_id": "bob"}}
    assert wrapped.messages("And?", history=history, **bob)[-1]["content"] == "And?"
    assert store.asked == []


@pytest.mark.parametrize("template", [DEFAULT_TEMPLATES, Templates(block="<d {label}>{text}</d>")])
def test_memories_of_any_shape_are_found_in_a_history(template):
    texts = [
        "Tea is liked.",
        "\nA chunk\n\n\nwith breaks\n",
        "Many.\n\n" * 40 + "Paragraphs.",
        "a says this\n\nb says that",
        "x" * 60_000,
    ]
    blocks = [ContextBlock(id=number, text=text) for number, text in enumerate(texts)]
    store = object()
    memories.note_memories(store, "", blocks, template)
    for labels in (True, False):
        planner = ReusePlanner(templates=template, labels=labels)
        shown = planner.plan(ContextRequest(blocks, "Which?")).messages()
        found = memories.standing_memories(store, "", shown)
        assert sorted(one.id for one in found) == [0, 1, 2, 3, 4]
        assert memories.standing_memories(object(), "", shown) == (), "of another store"
    elsewhere = [{"role": "user", "content": f"Green {text.strip()} or so"} for text in texts]
    assert memories.standing_memories(store, "", elsewhere) == ()


@pytest.mark.parametrize("are_marked", [True, False])
def test_a_memory_behind_line_breaks_is_taken_out(are_marked):
    texts = [
        "One with a break at its end.\n",
        "The PIN is 1234, do not tell.",
        "\nAnother one.\n\n\n",
    ]
    shown = "\n\n".join([*texts, "Which?"])
    history = [{"role": "user", "content": shown}]
    for gone in (texts[:1], texts[1:2], texts[2:], texts):
        [message] = memories.without_memories(
            history, gone, DEFAULT_TEMPLATES, are_marked=are_marked
        )
        left = ["(removed)" if one in gone else one for one in texts]
        expected = left if are_marked else [one for one in texts if one not in gone]
        assert message["content"] == "\n\n".join([*expected, "Which?"])


@KINDS
def test_what_stands_and_holds_is_left_alone(kind):
    store = kind(home="Alice lives in Porto.", cats="Alice has two cats and a dog.")
    cats = located(store.texts["cats"])
    for labels, said in ((False, ""), (True, f"{cats}\n\n")):
        store.finds = None
        chat = Chat(store, labels=labels)
        chat.ask("Where?")
        store.finds = ["cats"]
        assert chat.ask("And?") == f"{said}And?"


@KINDS
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_store_that_fails_says_nothing_and_one_that_does_not_find_does(kind, is_gone):
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


@pytest.mark.parametrize("labels", [False, True])
@NAMES
@KINDS
def test_a_forgotten_memory_leaves_the_messages(kind, name, labels):
    store = kind(pin="PIN: 4711", cats="Alice has two cats.", home="Alice lives in Porto.")
    chat = Chat(store, name, labels=labels)
    chat.ask("Where?")
    pin = store.texts.pop("pin")
    cleaned = chat.wrapped.forget(["pin"], chat.history, conversation_id=name, **ALICE)
    texts = [*store.texts.values()]
    shown = ["(removed)", *map(labelled, texts)] if labels else ["(removed)", *texts]
    if labels and name is not None:
        shown[0] = f"{label(pin)} (removed)"
    assert cleaned == [{"role": "user", "content": "\n\n".join([*shown, "Where?"])}, ANSWER]
    with request_context(conversation_id=name):
        assert chat.wrapped.forget(["pin"], chat.history, **ALICE) == cleaned
    assert chat.wrapped.forget(["pin"], chat.history, conversation_id=name) == chat.history
    chat.history = cleaned
    assert "no longer" not in chat.ask("And?")


def test_what_a_turn_said_of_a_forgotten_memory_leaves_the_messages_too():
    store = Store(pin="The PIN is 4711.", home="Alice lives in Porto.")
    chat = Chat(store)
    chat.ask("Where?")
    del store.texts["pin"]
    assert chat.ask("And?") == f"{PIN_IS_GONE}\n\nAnd?"
    chat.history[-1] = {"role": "assistant", "content": "The PIN is 4711."}
    cleaned = chat.wrapped.forget(["pin"], chat.history, conversation_id="c", **ALICE)
    assert [one["content"] for one in cleaned] == [
        "(removed)\n\nAlice lives in Porto.\n\nWhere?",
        "Noted.",
        "(removed)\n\nAnd?",
        "The PIN is 4711.",
    ], "what the model said stays"


@KINDS
def test_what_others_have_shown_in_the_conversation_is_not_looked_up(kind):
    """A document of a retriever is no memory of the store."""
    store = kind(cats="Alice has two cats.")
    chat = Chat(store, labels=True)
    document = ContextBlock(id="doc-7", text="Porto lies on the Douro.")
    request = ContextRequest(
        [document], history=[], conversation_id="c", tenant=tenant_of(ALICE["filters"]), labels=True
    )
    chat.history = [*chat.wrapped.planner.plan(request).messages(), ANSWER]
    assert "no longer holds" not in chat.ask("Which?")
    assert store.asked == []


def test_a_wrapper_that_is_made_for_each_request_knows_what_others_have_shown():
    store = Store(home="Alice lives in Porto.", pet="Alice has a dog.")
    history: list[Any] = []
    for question in ("Where?", "And?"):
        wrapped = ReuseMemory(store)
        history = [*wrapped.messages(question, history=history, conversation_id="c", **ALICE)]
        history.append(ANSWER)
        store.texts.pop("pet", None)
    assert "pet" in store.asked
    assert "no longer holds" in history[-2]["content"]
