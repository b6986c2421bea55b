"""Each sentence of the guide on what happens to a prompt is held by a test."""

import json
import re
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any, get_args

import langchain_agent_helpers as agents
import pytest
from adapter_conformance import FaultyPlanner
from block_labels import label
from doc_pages import ROOT
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ToolMessage, messages_from_dict, messages_to_dict
from langchain_core.messages.utils import convert_to_messages
from langchain_core.runnables import RunnableLambda
from langchain_document_helpers import LetterRetriever, documents, letters_of, text_of
from langchain_model_helpers import RecordingModel, StreamingModel
from langgraph.store.base import SearchItem
from langgraph.store.memory import InMemoryStore
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import MetadataMode, NodeWithScore
from llamaindex_helpers import LetterRetriever as LetterNodes
from llamaindex_helpers import RecordingLLM, letter_nodes
from mem0_stores import FakeMemory, lettered

import langchain_ctxreuse as for_langchain
import llamaindex_ctxreuse as for_llamaindex
from ctxreuse import ReusePlanner, request_context
from ctxreuse.pipeline import context_finder, prompt_turn
from ctxreuse.pipeline.known_texts import known_texts
from langchain_ctxreuse import ReuseChatModel, format_context
from llamaindex_ctxreuse import ReuseLLM
from mem0_ctxreuse import ReuseMemory

PAGE = ROOT / "docs/guides/what-happens-to-a-prompt.md"
HELD: set[str] = set()
"""The sentences that tests hold."""


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=\.) (?=[A-Z`])", " ".join(text.split()))


def holds(*texts: str) -> Callable[[Any], Any]:
    """Say which sentences of the page a test holds."""
    HELD.update(one for text in texts for one in sentences(text))
    return lambda test: test


def table(text: str) -> list[tuple[str, list[str]]]:
    """Return the prompts of each case, which is indented, with the sentences above it; hold these.

    Prompts have `=>` between them, their messages `|`. Messages are the user's, but for those that
    begin with `S>` for system, `A>` for assistant, `T>` for tool, or `J>` for options of the call.
    """
    cases = []
    for lines, below in re.findall(r"((?:^\S.*\n)+)((?:^ {4}.*\n)+)", text, re.MULTILINE):
        held = " ".join(lines.split())
        holds(held)
        prompts = re.sub(r"\n {8}", " ", below).splitlines()
        cases += [(held, one[4:].replace(r"\n", "\n").split(" => ")) for one in prompts]
    return cases


TEXTS = {letter: text_of(letter) for letter in "abcdef"}
TEXTS |= {"s": "s says: ".ljust(30, "s"), "t": "t says: ".ljust(31, "t")}  # short ones
TEXTS |= {"x": f"526 says: {'x' * 90}", "y": f"609 says: {'x' * 90}"}
assert label(TEXTS["x"]) == label(TEXTS["y"])


def filled(text: str) -> str:
    """Return a text with documents for `{cab}`, and under their labels for `{#cab}`.

    `{cab|, }` has another separator, `{.cab}` documents with numbers, `{~cab}` neighbours of one
    source, `{"cab}` texts that are not rendered anew, and `{@cab}` labels alone.
    """

    def shown(found: re.Match[str]) -> str:
        sign, letters, separator = found[1], found[2], found[3] or "\n\n"
        if sign == "@":
            return ", ".join(label(TEXTS[letter]) for letter in letters)
        if sign == '"':
            return separator.join(TEXTS[letter] for letter in letters)
        given = [
            Document(TEXTS[one], metadata={"n": ord(one), "start_index": at, "source": source})
            for one in letters
            for at, source in [(408 * ord(one), "one" if sign == "~" else one)]
        ]
        template = "{n}. {page_content}" if sign == "." else None
        return format_context(given, template, separator, labels=sign == "#")

    return re.sub(r"\{([#@.~\"]?)([a-z]+)\|?([^}]*)\}", shown, text)


def as_given(prompt: str) -> str:
    """Return the texts of a prompt that is sent as it is."""
    return filled(re.sub(r"(^| \| )[SAT]>", r"\1", re.sub(r"^J>.*? \| ", "", prompt)))


class Chat:
    def __init__(self, **settings: Any) -> None:
        self.inner: Any = RecordingModel()
        settings.setdefault("planner", ReusePlanner())
        self.model: Any = ReuseChatModel(inner=self.inner, window_s=0, **settings)

    def ask(self, said: list[tuple[str, str]], **options: Any) -> list[str]:
        """Send messages that come from JSON; return their texts as sent."""
        given = [ToolMessage(one[1], tool_call_id="1") if one[0] == "tool" else one for one in said]
        stored = json.dumps(messages_to_dict(convert_to_messages(given)))
        self.model.invoke(messages_from_dict(json.loads(stored)), **options)
        return [str(one.text) for one in self.inner.calls[-1].messages]

    def send(self, prompt: str) -> str:
        """Send a prompt, written as in a table; return the texts as sent."""
        options, said = re.findall(r"^(?:J>(.*?) \| )?(.*)$", prompt, re.DOTALL)[0]
        roles = {"S": "system", "A": "assistant", "T": "tool", "": "user"}
        parts = [re.findall(r"^(?:([SAT])>)?(.*)$", one, re.DOTALL)[0] for one in said.split(" | ")]
        given = [(roles[role], filled(text)) for role, text in parts]
        return " | ".join(self.ask(given, **json.loads(options or "{}")))

    @property
    def counts(self) -> Counter[str]:
        seen = self.model.prompt_statistics
        own = {name: getattr(seen, name) for name in ("planned", "in_history", "not_found")}
        return +Counter({**own, **seen.in_place})


class Llama(Chat):
    def __init__(self, **settings: Any) -> None:
        self.inner = RecordingLLM()
        settings.setdefault("planner", ReusePlanner())
        self.model = ReuseLLM(inner=self.inner, window_s=0, **settings)

    def ask(self, said: list[tuple[str, str]], **options: Any) -> list[str]:
        """Send messages that come from JSON; return their texts as sent."""
        stored = [ChatMessage(role=role, content=text).model_dump_json() for role, text in said]
        self.model.chat(list(map(ChatMessage.model_validate_json, stored)), **options)
        return [one.content or "" for one in self.inner.chats[-1]]


BOTH = pytest.mark.parametrize("application", [Chat, Llama])


def found_by(kind: str, found: list[Any], **own: Any) -> Any:
    """Return what a search finds, in the order of a component that sees no prompt."""

    def search(*_: Any, **__: Any) -> Any:
        return found

    match kind:
        case "retriever":
            return for_langchain.ReuseRetriever(retriever=RunnableLambda(search), **own).invoke("?")
        case "compressor":
            return for_langchain.ReuseCompressor(**own).compress_documents(found, "?")
        case "postprocessor":
            return for_llamaindex.ReusePostprocessor(**own).postprocess_nodes(found, query_str="?")
        case "node retriever":
            inner = type("Given", (BaseRetriever,), {"_retrieve": search})()
            return for_llamaindex.ReuseRetriever(inner, **own).retrieve("?")
        case "memory":
            return ReuseMemory(FakeMemory(found), **own).search("?", user_id="u")["results"]
    store = type("Given", (InMemoryStore,), {"search": search})()
    return for_langchain.ReuseStore(store, **own).search(("m",), query="?")


def stored_items(letters: str) -> list[SearchItem]:
    day: Any = "2026-01-01"
    return [SearchItem(("m",), one, {"text": text_of(one)}, day, day) for one in letters]


OF_DOCUMENTS: dict[str, Any] = {"retriever": documents, "compressor": documents}
OF_DOCUMENTS |= {"postprocessor": letter_nodes, "node retriever": letter_nodes}
KINDS = {**OF_DOCUMENTS, "memory": lettered, "store": stored_items}


def own() -> dict[str, Any]:
    """Return the setting of a planner apart."""
    return {"planner": ReusePlanner()}


TEMPLATE = "## {source}\n<doc>{page_content}</doc>"
NODE = "# {source}\n<doc>{content}</doc>"


@holds(
    "They come from a retriever, `format_context`, a memory search, or a wrapped store. Each is "
    "known as it is, stripped, as a LlamaIndex node shows itself, and as "
    "`format_context(documents, document_prompt=...)` made it: with heading, source and tags. The "
    "texts change places."
)
@pytest.mark.parametrize(
    ("application", "texts_of"),
    [
        (Chat, lambda of: [one.page_content for one in LetterRetriever(store={}).invoke(of)]),
        (Chat, lambda of: [format_context([Document(f"\n {TEXTS[n]}\n")]).strip() for n in of]),
        (Chat, lambda of: format_context(documents(of), TEMPLATE, "~").split("~")),
        (Chat, lambda of: [one["memory"] for one in found_by("memory", lettered(of), **own())]),
        (
            Chat,
            lambda of: [one.value["text"] for one in found_by("store", stored_items(of), **own())],
        ),
        (Llama, lambda of: [n.get_content(MetadataMode.LLM) for n in LetterNodes().retrieve(of)]),
        (Llama, lambda of: [one.text for one in LetterNodes().retrieve(of)]),
        (Llama, lambda of: for_llamaindex.format_context(letter_nodes(of), NODE, "~").split("~")),
    ],
)
def test_known_texts_change_places(application, texts_of):
    application = application()
    a, b, c = texts_of("abc")
    application.send("\n---\n".join([a, b, c]) + "\n\nWhich?")
    assert texts_of("cab") == [c, a, b]
    sent = application.send("\n---\n".join([c, a, b]) + "\n\nWhere?")
    assert sent == "\n---\n".join([a, b, c]) + "\n\nRead documents 3, 1, 2 first.\n\nWhere?"


@holds("Known texts belong to this process and this tenant. Tenants share nothing.")
@BOTH
def test_texts_and_orders_of_other_tenants_and_processes_are_not_known(application):
    application = application()
    application.send("{abc}")
    text = filled("{cab}")
    with request_context(tenant="other"):
        assert application.send(text) == text
        assert application.counts == {"planned": 1, "not_found": 1}
        assert application.send("{cab}") == text
    known_texts().forget_all()  # as in another process
    assert application.send(text) == text
    assert application.counts == {"planned": 2, "not_found": 2}


PROMPTS = table(r"""
`ReuseChatModel` and `ReuseLLM` change prompts by these rules only.
    {abc} => S>Be brief. | Who? | A>So. |  \n {c}\n\n{b}a
A *context* is a run of at least two different known texts with one separator between all of them.
    {abc} => {c}
    {abc} => {c}\n\n{c}
    {abc} => {cab}\n---\n{d} => {abc}\n\nRead documents 3, 1, 2 first.\n---\n{d}
    {abc} => {c}\n\n{a} => {ac}\n\nRead documents 2, 1 first.
The separators and everything else stay.
    S>Be kind.\n | A:\n{abc|\n} | ? => S>Be kind.\n | A:\n{cab|\n} | ?
        => S>Be kind.\n | A:\n{abc|\n}\nRead documents 3, 1, 2 first. | ?
    A:\n{abc|\n\n---\n}\n\n ? => A:\n{cab|\n\n---\n}\n\n ?
        => A:\n{abc|\n\n---\n}\n\nRead documents 3, 1, 2 first.\n\n ?
Numbers or headings written by hand between the texts keep all in place:
    {abc} => 1. {c}\n\n2. {a}\n\n3. {b}
    {abc} => ## C\n{c}\n\n## A\n{a}\n\n## B\n{b}
`format_context(documents, "{n}. {page_content}")` makes the number a part of its text. Both move
together. Documents with numbers of your own get no such line.
    {.abc}\n\nWho? => {.cab}\n\nWhy? => 97. {a}\n\n98. {b}\n\n99. {c}\n\nWhy?
The messages behind the last answer are new, and so is a system message that is not known.
    {ba} | A>So. | {abc} => {ba} | A>So. | {cab}
        => {ba} | So. | {abc}\n\nRead documents 3, 1, 2 first.
    S>{abc} | Who? => S>{ca} | Who? | A>So. | Why?
        => {ac}\n\nRead documents 2, 1 first. | Who? | So. | Why?
A begun answer at the end does not count.
    {abc} => {ca} | A>It is => {ac}\n\nRead documents 2, 1 first. | It is
A tool's result keeps its order, as do labelled documents behind an answer, even an example's.
    Go. | A> | T>{abc} => Go. | A> | T>{cab}
    {#ab} | A>So. | {#def} => {#ab} | A>So. | {#fed}
Unless the best three stand first, one line behind the documents names them: by labels, else by
places.
    {abcd} => {dbca}\n\nWhy? => {abcd}\n\nRead documents 4, 2, 3 first.\n\nWhy?
    {#abcd} => {#dbca}\n\nWhy? => {#abcd}\n\nRead documents {@dbc} first.\n\nWhy?
    {abcde} => {abced}\n\nWhy? => {abcde}\n\nWhy?
Only labelled documents are left out when the conversation shows them already. One line says where
they stand:
    {abc} => {abc} | A>So. | {bda}
    {abc} => {#abc} | A>So. | {#bda}\n\nWhy?
        => {#abc} | So. | {#d}\n\nSee also {@ba} above.\n\nWhy?
Nothing refers to a text that somebody else labelled, or to two texts with one label.
    ? => {#ab}\n\n{@a} No. | A>So. | {#ab}
        => {#ab}\n\n{@a} No. | So. | {#a}\n\nSee also {@b} above.
    ? => {#ab} | {@a} No. | A>So. | {#ab} => {#ab} | {@a} No. | So. | {#a}\n\nSee also {@b} above.
    ? => {#bc} | {@a} No. | A>So. | {#ab} => {#bc} | {@a} No. | So. | {#a}\n\nSee also {@b} above.
    ? => {#xyb} | A>So. | {#xb} => {#xyb} | So. | {#x}\n\nSee also {@b} above.
    ? => {#yb} | A>So. | {#xb} => {#yb} | So. | {#x}\n\nSee also {@b} above.
If a text was trimmed or summarized away, references to it are written out again.
    {#abc} | A>So. | {#bd}\n\nWhy? => {#bd}\n\nWhy? | A>No. | So?
        => {#db}\n\nWhy? | No. | So?
    {#abc} | A>So. | {#bd}\n\nWhy? => In short: yes. | {#bd}\n\nWhy? | A>No. | So?
        => In short: yes. | {#db}\n\nWhy? | No. | So?
A forgotten user or tool message is sent as given.
    {abc} => {cab} | T>{cab} | {#cab} | A>So. | So?
""")


@BOTH
@pytest.mark.parametrize(("held", "prompts"), PROMPTS)
def test_a_prompt_is_sent_as_the_page_says(application, held, prompts):
    application = application()
    application.send(prompts[0])
    assert application.send(prompts[1]) == as_given(prompts[-1]), held


@holds(
    "`format_context(documents, labels=True)` shows each document once, under four letters. They "
    "come from its text alone. Labels never change. No answer, tool call or citation is renamed."
)
def test_labels_are_four_letters_of_the_text_alone():
    parts = filled("{#cabc}").split("\n\n")
    assert [re.sub(r"^\[[A-Z]{4}\] ", "", one) for one in parts] == list(map(text_of, "cab"))
    others = [Document(text_of(letter), id="id", metadata={"n": 1}) for letter in "abc"]
    assert sorted(format_context(others, labels=True).split("\n\n")) == sorted(parts)
    application, name = Chat(), filled("{@c}")
    application.send("{#abc}")
    call = {"name": "open", "args": {"document": name}, "id": "1"}
    result = ToolMessage(f"Here is {name}.", tool_call_id="1")
    said = [AIMessage(f"See {name}.", tool_calls=[call]), result, AIMessage(f"{name} says so.")]
    application.model.invoke([("user", filled("{#cab}")), *said, ("user", filled("{#bd}"))])
    assert application.inner.calls[-1].messages[1:-1] == said


def test_an_agents_tool_results_keep_their_order_and_are_shown_once():
    answers = [agents.calls("ab"), agents.calls("cab"), agents.done()]
    agent, inner = agents.agent_with(for_langchain.ReuseMiddleware(), answers, agents.search_tool())
    agents.ask(agent, "Search.")
    results = [one["content"] for one in inner.seen[-1] if one["role"] == "tool"]
    assert results == [filled("{#ab}"), filled("{#c}\n\nSee also {@ab} above.")]


@holds(
    "Each message is sent as before, byte for byte, except for breakpoints of hosted caches. A "
    "message loaded from JSON is the same message."
)
@pytest.mark.parametrize("sign", ["", "#"])
@pytest.mark.parametrize(
    ("application", "cache"), [(Chat, {}), (Llama, {}), (Chat, {"cache": "anthropic"})]
)
def test_what_was_sent_is_sent_again(application, cache, sign, monkeypatch):
    for letter in "abcdef":  # long enough for hosted caches
        monkeypatch.setitem(TEXTS, letter, text_of(letter) + " and so on" * 1_000)
    application = application(planner=ReusePlanner(**cache))
    application.send(f"{{{sign}abc}}")
    said, sent, breakpoints = "S>Be brief.", "", set()
    for letters in ("cab", "bad", "fed", "abc"):
        message, before = f"{{{sign}{letters}}}\n\nWhy {letters}?", sent
        sent = application.send(said := f"{said} | {message}")
        assert sent.startswith(before)
        said, sent = f"{said} | A>So.", f"{sent} | So."
        content = application.inner.calls[-1].messages[1].content if cache else ""
        breakpoints.add(tuple("cache_control" in part for part in content))
        application.send(message)  # as another conversation
    assert len(breakpoints) == 1 + len(cache)


OUTCOMES = table(r"""
`model.prompt_statistics` counts each prompt once: `planned`, `in_history` (all that it shows was
planned before), `not_found` (no new message shows two different known texts), or `in_place` by its
reason:
    {bca} => {ab}\n\nB:\n{cd}\n\nC:\n{e}\n\nD:\n{f} => planned
    {bca} => {bca} | A>So. | And? => in_history
    {bca} => {ab} | A>So. | {c}\n\n{c} => not_found
    {bca} => {bca} | A>So. | {a}\n\nor\n\n{b} => words_between
""")


@BOTH
@pytest.mark.parametrize(("held", "prompts"), OUTCOMES)
def test_each_prompt_is_counted_once(application, held, prompts):
    application = application()
    for prompt in prompts[:2]:
        application.send(prompt)
    assert application.counts == Counter(["planned", prompts[2]]), held


REASONS = table(r"""
`words_between` | known texts have words between them, or one list stands in pieces |
`format_context(document_prompt=...)`
    {c}\n\nAnd:\n{a} => {.ca}
    {cabd} => {"ca}\n\nAnd:\n{"bd} => {.cabd}
`behind_changing_words` | no earlier prompt begins as this one does, after two; or it is a tool's
result | `{context}` before `{question}`, no date or name in front
    1 May\n{abc} => 2 May\n{abc} => 3 May\n{abc} => {abc}\n\n3 May
    Go. | A> | T>{abc} => Go. | A> | {abc}
`too_short` | the documents are shorter than twice the words on their order | none needed
    {st} => {st|\n\n\n}
`sequence` | neighbours of one document stand in reading order | none needed
    {~abc} => {~cab}
`numbers` | your words, tools or schema speak of citations or numbers, and the documents have none |
`labels=True`
    Cite them.\n{abc} => Cite them.\n{#abc}
    {abc}\n\nName the document number. => {.abc}\n\nName the document number.
    J>{"tools": [{"name": "cite"}]} | {abc} => J>{"tools": [{"name": "cite"}]} | {#abc}
    J>{"response_format": {"type": "integer"}} | {abc}
        => J>{"response_format": {"type": "integer"}} | {#abc}
`order` | your words say what the order means: sorted, oldest first, ranking | leave the words out,
or the order
    Sorted by date:\n{abc} => By date:\n{abc}
    Oldest first:\n{#abc} => {#abc}
    {abc} => {bc}\n\nMind the ranking. => {cd}\n\nMind the ranking. => {cd}\n\nMind the rank.
`twice` | the same documents stand twice | show them once
    {abc}\n\n\n{abc} => {abc}\n\n\nAgain?
    {abcd} => {adcab}\n\nWhich? => {dcab}\n\nWhich?
""")


@holds(
    "Your words are lines that several prompts share, and all lines of the first. Nothing is added "
    "to a context that stays."
)
@BOTH
@pytest.mark.parametrize(("row", "prompts"), REASONS)
def test_a_context_stays_for_a_reason_that_has_a_remedy(application, row, prompts):
    *before, stays, mended = prompts
    application, other = application(), application()
    for prompt in before:
        application.send(prompt)
        other.send(prompt)
    assert application.send(stays) == as_given(stays)
    reason = row.split("`")[1]
    assert application.counts == Counter([reason, *["planned"] * len(before)])
    for _ in range(2):  # a beginning that is new stays the first time
        other.send(mended)
    assert other.counts["planned"] > len(before)


@holds("`too_long` | it takes too much work to tell the texts apart | fewer texts that begin alike")
def test_texts_that_are_hard_to_tell_apart_stay():
    application, long = Chat(), "{abc}" + "\nline" * 4_000
    format_context([Document("line\n" * number + "x") for number in range(3, 400)])
    assert application.send(long) == as_given(long)
    application.send(long.replace("line", "word"))
    assert application.counts == {"too_long": 1, "planned": 1}


@holds(
    "After 20 prompts in a row of one kind of wrapper without a planned context, one log line says "
    "what to change."
)
def test_after_twenty_prompts_one_line_says_what_to_change(caplog):
    prompt_turn._log_nothing_planned.cache_clear()
    planner = ReusePlanner()
    chat, llama = Chat(planner=planner), Llama(planner=planner)
    for prompt in (*["Hi."] * 19, "{abc}", *["Hi."] * 19):
        chat.send(prompt)
        llama.send(prompt)
    assert not caplog.records
    for _ in range(21):
        chat.send("Hi.")
        [record] = caplog.records
    assert "with format_context, in the tenant's scope" in record.getMessage()


@holds(
    "Retrievers, compressors, postprocessors, `ReuseMemory.search` and `ReuseStore.search` return "
    "your own objects, unchanged, as many as came. They stand in planned order, a repeat behind "
    "all others. They claim no savings. `annotation=True` adds a document that says the ranking, "
    "for models that you cannot wrap. `drop_repeats=True` leaves repeats out."
)
@pytest.mark.parametrize("kind", KINDS)
def test_who_does_not_see_the_prompt_only_orders(kind):
    planner, items = ReusePlanner(), KINDS[kind]
    found_by(kind, items("abc"), planner=planner)
    given = items("cab" if kind == "node retriever" else "cabc")  # LlamaIndex drops repeats
    before = deepcopy(given)
    found = found_by(kind, given, planner=planner)
    assert list(map(id, found)) == [id(given[n]) for n in (1, 2, 0, 3)[: len(given)]]
    if kind in OF_DOCUMENTS:
        settings = {"planner": planner, "annotation": True, "drop_repeats": True}
        *found, line = found_by(kind, given, **settings)
        assert list(map(id, found)) == [id(given[n]) for n in (1, 2, 0)]
        assert "Read documents 3, 1, 2 first." in str(line)
    assert given == before
    assert planner.savings.requests == 0


@holds(
    "A wrapped model that finds their texts plans anew in their place, and ranks them as retrieved."
)
def test_a_model_plans_anew_what_a_retriever_has_put_in_order(planner):
    application = Chat(planner=planner)
    found_by("retriever", documents("abc"), planner=planner)
    words = "\n\nRead documents 3, 1, 2 first."
    for number, letters, line in ((2, "cab", ""), (3, "bca", words)):
        found = found_by("retriever", documents(letters), planner=planner)
        assert letters_of(found) == "abc"
        assert application.send('A:\n{"abc}') == filled("A:\n{cab}" + line)
        assert planner.statistics().requests == number, "one that no prompt shows, and one a prompt"
    assert planner.savings.requests == 2


def without_scores(letters: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=one.node) for one in letter_nodes(letters)]


@holds(
    "A retriever inside another one keeps the order (LlamaIndex: inside a `QueryFusionRetriever`)."
)
def test_a_retriever_inside_another_one_keeps_the_order():
    ours = for_langchain.ReuseRetriever(retriever=LetterRetriever(store={}))
    around = EnsembleRetriever(retrievers=[ours], weights=[1.0])
    unscored = {"_retrieve": lambda _, asked: without_scores(asked.query_str)}
    nodes = for_llamaindex.ReuseRetriever(type("Unscored", (BaseRetriever,), unscored)())
    fused = QueryFusionRetriever(
        [nodes], RecordingLLM(), num_queries=1, similarity_top_k=3, use_async=False
    )
    for asked, alone in (("abc", "abc"), ("cab", "abc")):
        assert [letters_of(one.invoke(asked)) for one in (ours, around)] == [alone, asked]
        found = [one.retrieve(asked) for one in (nodes, fused)]
        assert ["".join(node.text[0] for node in one) for one in found] == [alone, asked]


class Elsewhere(RecordingModel):
    base_url: str


@holds(
    "Wrappers without `planner=` share one for each engine: address and model. Those that see no "
    "model share one, too. A wrapper that is made for each call behaves like one that is made "
    "once. `planner=ReusePlanner()` is separate."
)
def test_wrappers_of_one_engine_share_a_planner():
    engines = [RecordingModel(), RecordingModel(model_name="other"), StreamingModel()]
    engines += [Elsewhere(base_url=f"http://{name}") for name in ("one", "two")]
    shared, again = ([ReuseChatModel(inner=one).planner for one in engines] for _ in range(2))
    llama = [ReuseLLM(inner=RecordingLLM()).planner for _ in range(2)]
    assert (shared, llama[0]) == (again, llama[1])
    blind = [for_langchain.ReuseCompressor().planner, for_llamaindex.ReusePostprocessor().planner]
    blind += [for_langchain.ReuseMiddleware().planner, ReuseMemory(FakeMemory()).planner]
    apart = ReuseChatModel(inner=engines[0], planner=ReusePlanner()).planner
    assert len({*shared, llama[0], *blind, apart}) == len(shared) + 3
    for letters in ("abc", "cab"):
        engine = RecordingModel()
        ReuseChatModel(inner=engine, window_s=0).invoke(filled(f"{{{letters}}}"))
    assert engine.calls[0].text == filled("{abc}\n\nRead documents 3, 1, 2 first.")


@holds(
    "All that is kept is bounded: see `prompt_statistics.parts` and `planner.statistics().parts`."
)
def test_all_that_is_kept_is_bounded():
    application = Chat()
    application.send("{abc}")
    format_context([Document(f"{number} says: " + "x" * 2_000_000) for number in range(17)])
    parts = {**application.model.prompt_statistics.parts}
    assert 30_000_000 < parts["known_characters"].entries <= 32_000_000
    parts |= application.model.planner.statistics().parts
    assert parts["index_nodes"].entries > 0
    assert [name for name, part in parts.items() if part.entries > part.bound] == []


@holds(
    "A planning fault never fails a call. The prompt is sent as given, and `model.faults` counts "
    "it."
)
@BOTH
def test_a_fault_of_ours_fails_no_call(application):
    application = application(planner=FaultyPlanner())
    assert application.send("{cab}\n\nWhich?") == filled("{cab}\n\nWhich?")
    assert application.model.faults == 1


def test_each_sentence_of_the_page_is_held_and_no_other():
    page = PAGE.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```|^#.*?$", "", page, flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (.*) \|$", prose, re.MULTILINE)
    paragraphs = re.sub(r"^\|.*$", "", prose, flags=re.MULTILINE).split("\n\n")
    said = [one for paragraph in paragraphs for one in sentences(paragraph) if one]
    assert sorted({*said, *rows[2:]}) == sorted(HELD)
    reasons = get_args(context_finder.Reason)
    assert {row.split("`")[1] for row, _ in REASONS} | {"too_long"} == set(reasons)
    assert set(context_finder.REMEDIES) == {*reasons, "not_found", "in_history"}
