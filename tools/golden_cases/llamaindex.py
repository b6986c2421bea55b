"""What reaches LlamaIndex's models, and what its retrievers and memories return."""

from __future__ import annotations

import asyncio
import re
from asyncio import run
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, SimpleChatEngine
from llama_index.core.memory import InsertMethod, Memory
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import MetadataMode
from llamaindex_helpers import LetterRetriever, ListChatStore
from llamaindex_helpers import letter_nodes as nodes
from llamaindex_helpers import said as _said
from llamaindex_memory_helpers import LetterMemory

from ctxreuse import ReusePlanner, Templates, request_context
from golden_cases.letters import HISTORY, WORDS, FaultyPlanner, text_of
from golden_cases.llamaindex_models import (
    NotingLLM,
    apieces_of,
    pieces_of,
    shown,
)
from golden_cases.recording import Cases, digest
from llamaindex_ctxreuse import (
    ReuseChatEngine,
    ReuseLLM,
    ReuseMemoryBlock,
    ReusePostprocessor,
    ReuseRetriever,
    format_context,
    reuse_memory,
)
from mem0_ctxreuse import ReuseMemory

CASES = Cases()
_ANNOTATIONS = (False, True)
_BATCH = ("abc", "xyz", "bca", "zyx", "mno", "cab")
_PLAIN = MetadataMode.NONE
_TEMPLATES = {  # LlamaIndex's own differ from version to version
    "text_qa_template": PromptTemplate("Known:\n{context_str}\nAsked: {query_str}"),
    "refine_template": PromptTemplate("{existing_answer}\nMore:\n{context_msg}\n{query_str}"),
}


def _question(word: str, asked: str = "Which?") -> str:
    """Return a prompt with a context that was not planned yet."""
    return f"{_labelled(nodes(word))}\n\n{asked}"


def _labelled(found: Any) -> str:
    return format_context(found, metadata_mode=_PLAIN, labels=True)


def _user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def _orders(found: list[Any]) -> list[Any]:
    """Return nodes as their ids and a digest of all that they say."""
    return [[[one[0] for one in shown(result)], digest(shown(result))] for result in found]


@CASES
def retriever() -> Any:
    """One query after the other, in each annotation mode."""
    found: dict[str, Any] = {}
    for annotation in _ANNOTATIONS:
        planned = ReuseRetriever(LetterRetriever(), annotation=annotation)
        results = [planned.retrieve(f"{word} Which?") for word in WORDS]
        found[f"annotation={annotation}"] = {
            "results": [shown(result) for result in results[1:3]],
            "all": _orders(results),
            "texts": [format_context(result) for result in results[1:3]],
            "all texts": [digest(format_context(result)) for result in results],
            "labelled": [digest(_labelled(result)) for result in results],
        }
    return found


@CASES
def postprocessor() -> Any:
    """Nodes that something else retrieved, with and without what they say beside their text."""

    async def one_by_one(planned: ReusePostprocessor) -> list[Any]:
        return [await planned.apostprocess_nodes(nodes(word), query_str="?") for word in WORDS]

    found: dict[str, Any] = {}
    for annotation in _ANNOTATIONS:
        for mode in (MetadataMode.LLM, MetadataMode.NONE, MetadataMode.EMBED):
            planned = ReusePostprocessor(annotation=annotation, metadata_mode=mode)
            results = [planned.postprocess_nodes(nodes(word), query_str="?") for word in WORDS]
            results += run(one_by_one(planned))
            found[f"annotation={annotation}, {mode.value}"] = _orders(results)
    return found


@CASES
def whose_request() -> Any:
    """Tenants, conversations and histories."""
    planner = ReusePlanner()
    found: list[Any] = []
    for annotation in _ANNOTATIONS:
        planned = ReusePostprocessor(planner=planner, annotation=annotation, metadata_mode=_PLAIN)
        for word in ("abc", "cba", "bad"):
            for said in (
                {},
                {"tenant": "one"},
                {"conversation_id": "t1", "history": HISTORY},
                {"tenant": "two", "conversation_id": 7, "history": []},
            ):
                with request_context(**said):
                    result = planned.postprocess_nodes(nodes(word), query_str="?")
                found.append([_orders([result]), digest(_labelled(result))])
    return found


@CASES
def contexts_as_text() -> Any:
    """`format_context`: as LlamaIndex shows nodes, with labels, in a template, in other words."""
    words = Templates(label="({letters})", block="{label}: {text}", separator="\n")
    found = nodes("aba")
    return {
        "bare": format_context(found),
        "labels": [format_context(found, labels=True), _labelled(found)],
        "own labels": format_context(found, "{content}", label="source"),
        "a template": format_context(found, "<{source}>\n{content}", "\n---\n"),
        "nothing": format_context([]),
        "in other words": format_context(found, labels=True, templates=words),
    }


@CASES
def query_engine() -> Any:
    """LlamaIndex's query engines, with what is retrieved planned, or the model's calls."""
    planner = ReusePlanner()
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "postprocessor": (LetterRetriever(), {"node_postprocessors": [ReusePostprocessor()]}),
        "retriever": (ReuseRetriever(LetterRetriever()), {}),
        "refine": (
            ReuseRetriever(LetterRetriever(), planner=planner),
            {"response_mode": ResponseMode.REFINE},
        ),
    }
    found: dict[str, Any] = {}
    for name, (retrieves, options) in ways.items():
        for is_chat_model in (True, False):
            inner = NotingLLM(is_chat_model=is_chat_model)
            llm = (
                inner
                if name == "refine"
                else ReuseLLM(inner=inner, window_s=0, planner=ReusePlanner())
            )
            engine = RetrieverQueryEngine.from_args(retrieves, llm=llm, **_TEMPLATES, **options)
            for word in ("abc", "cba", "bd"):
                engine.query(f"{word} which?")
            kind = "chat" if is_chat_model else "completion"
            found[f"{name}, {kind}"] = inner.calls
    return found


_WAYS: dict[str, Callable[[ReuseLLM, str], Any]] = {
    "chat": lambda llm, text: llm.chat([_user(text)]).message.content,
    "achat": lambda llm, text: run(llm.achat([_user(text)])).message.content,
    "stream_chat": lambda llm, text: pieces_of(llm.stream_chat([_user(text)])),
    "astream_chat": lambda llm, text: run(apieces_of(llm.astream_chat([_user(text)]))),
    "complete": lambda llm, text: llm.complete(text).text,
    "acomplete": lambda llm, text: run(llm.acomplete(text)).text,
    "stream_complete": lambda llm, text: pieces_of(llm.stream_complete(text)),
    "astream_complete": lambda llm, text: run(apieces_of(llm.astream_complete(text))),
}


@CASES
def model_calls() -> Any:
    """One call after the other, in each way to call a model."""
    found: dict[str, Any] = {}
    for name, way in _WAYS.items():
        inner = NotingLLM()
        llm = ReuseLLM(inner=inner, window_s=0, planner=ReusePlanner())
        answers = [way(llm, _question(word)) for word in ("abc", "cab", "", "bde", "eb")]
        with request_context(tenant="two", conversation_id=3):
            answers.append(way(llm, f"So:\n{_question('cba')}\n{_question('xa')}"))
        whole = name in ("chat", "complete")
        calls = inner.calls if whole else [digest(call) for call in inner.calls]
        found[name] = {"calls": calls, "answers": answers}
    return found


@CASES
def model_messages() -> Any:
    """Several messages, parts, a conversation, other arguments, and what an engine is told."""
    inner = NotingLLM()
    llm = ReuseLLM(inner=inner, window_s=0, planner=ReusePlanner())
    first = _user(_question("abc"))
    with request_context(conversation_id="t1"):
        llm.chat([first])
        llm.chat([first, _said("So."), _user(_question("bd"))])
    image = ImageBlock(image=b"AA==", image_mimetype="image/png")
    known = f"Known:\n{_labelled(nodes('fgh'))}"
    parts = [TextBlock(text="Look:"), image, TextBlock(text=f" {_question('cab')}")]
    llm.chat(
        [
            ChatMessage(role="system", content=known),
            ChatMessage(role="user", blocks=parts),
            ChatMessage(role="tool", content=f"- {format_context(nodes('xa'))} -"),
            _user(f"{_question('hf')}\n{_question('gx')}"),
        ],
        temperature=0,
    )
    for strategy in ("paper", "none"):
        other = ReuseLLM(inner=inner, window_s=0, strategy=strategy, planner=ReusePlanner())
        for word in ("abc", "cab"):
            other.complete(_question(word), formatted=True)
    engine = ReuseLLM(
        inner=inner, window_s=0, send_cache_salt=True, send_session_id=True, salt_key="secret"
    )
    for said in ({}, {"tenant": "one"}, {"tenant": "one", "conversation_id": "t"}):
        with request_context(**said):
            engine.chat([_user("?")], extra_body={"top_k": 1})
            engine.complete("?")
    return inner.calls


@CASES
def model_batches() -> Any:
    """Batches are sent in the planned order and answered in the caller's."""
    prompts = [_question(word, f"q{number}") for number, word in enumerate(_BATCH)]
    failing = [*prompts[:3], _question("ab", "fail"), *prompts[3:]]
    chats = [[_user(prompt)] for prompt in prompts]
    ways: dict[str, Callable[[ReuseLLM], Any]] = {
        "complete_batch": lambda llm: llm.complete_batch(prompts, workers=1),
        "chat_batch": lambda llm: llm.chat_batch(chats, workers=1),
        "acomplete_batch": lambda llm: run(llm.acomplete_batch(prompts, workers=3)),
        "achat_batch": lambda llm: run(llm.achat_batch(chats)),
        "a failure": lambda llm: llm.complete_batch(failing, workers=1, return_exceptions=True),
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        inner = NotingLLM()
        answers = way(ReuseLLM(inner=inner, window_s=60, planner=ReusePlanner()))
        whole = name == "complete_batch"
        calls = inner.calls if whole else [[digest(c), _end(c)] for c in inner.calls]
        found[name] = {"calls": calls, "answers": [str(answer) for answer in answers]}
    return found


@CASES
def model_failures() -> Any:
    """The planner forgets what was planned for calls that fail before anything came."""
    told: list[Any] = []
    for breaks in (False, True):
        inner = NotingLLM(breaks=breaks)
        llm = ReuseLLM(inner=inner, window_s=0, planner=ReusePlanner())
        llm.complete(_question("abc"))
        for word, (name, way) in zip("pqrstuvw", _WAYS.items(), strict=True):
            try:
                way(llm, _question(f"{word}ab", "So?" if breaks else "fail"))
            except (ConnectionError, TimeoutError) as error:
                told.append(type(error).__name__)
            statistics = llm.planner.statistics()
            told.append([name, statistics.requests, statistics.tokens])
        llm.complete(_question("bpqrca"))
        told.append(inner.calls[-1])
        chat = _chat_engine(inner, planner=llm.planner)
        for text in ("ab One?", "yz fail", "ay Two?"):
            try:
                told.append(
                    list(chat.stream_chat(text).response_gen) if breaks else chat.chat(text)
                )
            except (ConnectionError, TimeoutError) as error:
                told.append(type(error).__name__)
            told.append(llm.planner.statistics().requests)
        told = [str(one) if not isinstance(one, (list, dict)) else one for one in told]
    return told


@CASES
def model_calls_at_a_time() -> Any:
    """Calls of tasks and of threads that come together are planned together."""
    prompts = [_question(word, f"q{number}") for number, word in enumerate(_BATCH)]
    tasks, threads = NotingLLM(), NotingLLM()

    async def together() -> None:
        llm = ReuseLLM(inner=tasks, window_s=0.1, planner=ReusePlanner())
        await asyncio.gather(*(llm.acomplete(prompt) for prompt in prompts))

    run(together())
    llm = ReuseLLM(inner=threads, window_s=0.1, strategy="none", planner=ReusePlanner())
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: copy_context().run(llm.complete, prompt), prompts))
    return {
        "tasks": [[digest(call), _end(call)] for call in tasks.calls],
        "threads, sorted": sorted([digest(call), _end(call)] for call in threads.calls),
    }


def _end(call: Any) -> str:
    return _last_text(call).rsplit("\n", 1)[-1]


def _last_text(call: Any) -> str:
    """Return a prompt, or the text that a chat ends with."""
    prompt = call["prompt"]
    return str(prompt if isinstance(prompt, str) else prompt[-1][-1])


def _chat_engine(llm: Any, **options: Any) -> ReuseChatEngine:
    return ReuseChatEngine(
        LetterRetriever(), llm, **{"metadata_mode": _PLAIN, "planner": ReusePlanner(), **options}
    )


@CASES
def chat_engine() -> Any:
    """Some turns in each way to ask, in full, with what the responses say."""

    async def astreamed(chat: ReuseChatEngine, text: str) -> str:
        response = await chat.astream_chat(text)
        return "".join([piece async for piece in response.async_response_gen()])

    ways: dict[str, Callable[[ReuseChatEngine, str], Any]] = {
        "chat": lambda chat, text: chat.chat(text).response,
        "achat": lambda chat, text: run(chat.achat(text)).response,
        "stream_chat": lambda chat, text: "".join(chat.stream_chat(text).response_gen),
        "astream_chat": lambda chat, text: run(astreamed(chat, text)),
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        inner = NotingLLM()
        chat = _chat_engine(inner, system_prompt="Be brief.")
        answers = [way(chat, text) for text in ("abc One?", "cbd Two?", " Hm?", "dax Three?")]
        calls = inner.calls[-1:] if name == "chat" else []
        calls += [digest(call) for call in inner.calls]
        found[name] = {"calls": calls, "answers": answers}
        said = [[one.role.value, one.content] for one in (*chat.chat_history, *chat.said)]
        found[name]["history"] = digest(said)
    inner = NotingLLM()
    chat = _chat_engine(inner, metadata_mode=MetadataMode.LLM)
    chat.chat("ab One?")
    response = chat.chat("cb Two?")
    found["sources"] = [shown(response.source_nodes), inner.calls[-1]]
    return found


@CASES
def chat_engines_of_one_planner() -> Any:
    """Conversations, tenants and system prompts; a history handed in; a question condensed."""
    inner, planner = NotingLLM(), ReusePlanner()
    for said in ({}, {"tenant": "one"}, {"tenant": "one", "conversation_id": "c"}):
        with request_context(**said):
            for system in (None, "Be brief."):
                chat = _chat_engine(inner, planner=planner, system_prompt=system)
                chat.chat("abc One?")
                _chat_engine(inner, planner=planner, system_prompt=system).chat("cba One?")
                chat.chat("cd Two?")
    later = _chat_engine(inner, planner=planner, chat_history=chat.chat_history)
    later.chat("da Three?")
    later.chat("da Four?", chat_history=[_user("Hm?"), _said("Ah.")])
    later.reset()
    later.chat("da Five?")
    condensing = _chat_engine(
        inner, planner=planner, skip_condense=False, condense_prompt="{chat_history} | {question}"
    )
    condensing.chat("ab One?")
    condensing.chat("Which?")
    planned = ReuseChatEngine(
        ReuseRetriever(LetterRetriever(), planner=planner),
        inner,
        planner=planner,
        metadata_mode=_PLAIN,
        node_postprocessors=[ReusePostprocessor(planner=planner, metadata_mode=_PLAIN)],
    )
    with request_context(conversation_id="again"):
        for text in ("abc One?", "cba Two?", "bd Three?"):
            planned.chat(text)
    with request_context(conversation_id="known", history=HISTORY):
        planned.chat("ab Four?")
    return [*map(digest, inner.calls), *inner.calls[-4:]]


@CASES
def chat_engine_with_a_small_window() -> Any:
    """The oldest turns go when the model's context window is full, and come back as needed."""
    found: dict[str, Any] = {}
    for name, counter in (("estimated", None), ("counted", lambda text: len(text) // 4)):
        inner = NotingLLM(context_window=1_000, num_output=100)
        planner = ReusePlanner()
        chat = _chat_engine(inner, planner=planner, token_counter=counter)
        for number, word in enumerate(("ab", "cd", "ef", "gh", "ij", "kl", "ab")):
            chat.chat(f"{word} {number}?")
        tiny = _chat_engine(NotingLLM(context_window=300, num_output=100), planner=planner)
        tiny.chat("abcd One?")
        found[name] = {
            "calls": [[_letters(call["prompt"]), digest(call)] for call in inner.calls],
            "last call": inner.calls[-1],
            "requests": planner.statistics().requests,
        }
    return found


def _letters(messages: list[Any]) -> str:
    """Return the letters that each of some messages shows."""
    return " ".join("".join(re.findall(r"(\w) says:", str(said))) for said in messages)


def _memory(*blocks: Any, **options: Any) -> Any:
    return reuse_memory(*blocks, chat_store=ListChatStore(), session_id="s", **options)


async def _talk(memory: Any, texts: list[str], as_input: bool = False) -> list[Any]:
    """Return what a memory gives a model in some turns."""
    told = []
    for number, text in enumerate(texts):
        if as_input:
            messages = await memory.aget(input=text)
            await memory.aput(_user(text))
        else:
            await memory.aput(_user(text))
            messages = await memory.aget()
        told.append([[one.role.value, *(part.text for part in one.blocks)] for one in messages])
        await memory.aput(_said(f"answer {number}."))
    return told


@CASES
def memories() -> Any:
    """Memories stay where they were sent; what is shown already is only pointed to."""
    texts = ["abc One?", "cbd Two?", "", "dax Three?"]
    found: dict[str, Any] = {}
    block = ReuseMemoryBlock(memory=LetterMemory(), filters={"user_id": "ann"})
    found["replayed"] = run(_talk(_memory(block), texts))[-1]
    again = ReuseMemoryBlock(memory=LetterRetriever(), searched_messages=2)
    found["before the question"] = run(_talk(_memory(again), texts, as_input=True))[-1]
    small = ReuseMemoryBlock(memory=LetterMemory(), top_k=3)
    small_memory = _memory(small, token_limit=700, chat_history_token_ratio=0.9)
    found["a small limit"] = [
        [digest(one), _letters(one)] for one in run(_talk(small_memory, [*texts, *texts]))
    ]
    theirs = ReuseMemoryBlock(memory=LetterMemory())
    plain = Memory.from_defaults(
        memory_blocks=[theirs],
        insert_method=InsertMethod.USER,
        chat_store=ListChatStore(),
        session_id="s",
    )
    found["LlamaIndex's own memory"] = [digest(one) for one in run(_talk(plain, texts))]
    inner = NotingLLM()
    chat = SimpleChatEngine.from_defaults(
        llm=inner, memory=_memory(ReuseMemoryBlock(memory=LetterMemory()))
    )
    for text in texts:
        run(chat.achat(text))
    found["chat engine"] = [digest(call) for call in inner.calls]
    return found


@CASES
def memory_blocks() -> Any:
    """What a block returns, and how it is shortened."""

    async def asked() -> list[Any]:
        planner = ReusePlanner()
        block = ReuseMemoryBlock(memory=LetterMemory(), planner=planner)
        told = [await block.aget([_user(word)]) for word in ("abc", "cba", "")]
        with request_context(tenant="one", conversation_id="c", history=HISTORY):
            told.append(await block.aget([_user("bcd")]))
        content = told[1]
        told += [await block.atruncate(content, tokens) for tokens in (50, 150, 5_000)]
        described = ReuseMemoryBlock(memory=LetterRetriever(), metadata_mode=MetadataMode.LLM)
        told.append(await described.aget([_user("one"), _user("ba")]))
        planned = ReuseMemory(LetterMemory(), planner=planner)
        over_planned = ReuseMemoryBlock(memory=planned, planner=planner)
        told += [await over_planned.aget([_user(word)]) for word in ("cab", "xab")]
        return [*told, planner.statistics().requests, text_of("a") in content]

    return run(asked())


@CASES
def condense_plus_context() -> Any:
    """LlamaIndex's own chat engine over our postprocessor and model."""
    inner = NotingLLM()
    engine = CondensePlusContextChatEngine.from_defaults(
        retriever=LetterRetriever(),
        llm=ReuseLLM(inner=inner, window_s=0, planner=ReusePlanner()),
        node_postprocessors=[ReusePostprocessor()],
        memory=Memory.from_defaults(chat_store=ListChatStore()),
        skip_condense=True,
        context_prompt="Known:\n{context_str}",
    )
    for text in ("abc One?", "cba Two?", "bd Three?"):
        run(engine.achat(text))
    return inner.calls


@CASES
def planning_faults() -> Any:
    """Where planning fails, everything goes through as it is."""
    inner = NotingLLM()
    llm = ReuseLLM(inner=inner, window_s=0, planner=FaultyPlanner())
    llm.complete(_question("ab"))
    llm.complete_batch([_question("ab"), _question("ba")], workers=1)
    chat = _chat_engine(inner, planner=FaultyPlanner())
    chat.chat("ba One?")
    planned = ReuseRetriever(LetterRetriever(), planner=FaultyPlanner())
    block = ReuseMemoryBlock(memory=LetterMemory(), planner=FaultyPlanner())
    return {
        "calls": inner.calls,
        "retriever": shown(planned.retrieve("ba")),
        "memory": run(block.aget([_user("ba")])),
        "faults": [llm.faults, chat.faults, planned.faults, block.faults],
    }
