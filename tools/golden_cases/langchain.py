"""What reaches LangChain's models, and what its retrievers return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_agent_helpers import Scripted, search_tool
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import tool
from langchain_document_helpers import documents
from langgraph.checkpoint.memory import InMemorySaver

from ctxreuse import ReusePlanner, Templates, request_context
from golden_cases.langchain_models import (
    LetterRetriever,
    NotingModel,
    NotingStream,
    messages_of,
    searching,
    shown,
)
from golden_cases.letters import HISTORY, WORDS, FaultyPlanner, text_of
from golden_cases.recording import Cases, digest
from langchain_ctxreuse import (
    ReuseChatModel,
    ReuseCompressor,
    ReuseMiddleware,
    ReuseRetriever,
    format_context,
)

CASES = Cases()
_BATCH = ("abc", "xyz", "bca", "zyx", "mno", "cab")


def _question(word: str, asked: str = "Which?", tenant: str | None = None) -> str:
    """Return a prompt with a context that was not planned yet."""
    with request_context(tenant=tenant):
        return f"{format_context(documents(word))}\n\n{asked}"


@CASES
def retriever() -> Any:
    """One query after the other, alone and with what may be asked for."""
    found: dict[str, Any] = {}
    for name, options in (
        ("alone", {}),
        ("annotation", {"annotation": True}),
        ("no repeats", {"drop_repeats": True}),
    ):
        planned = ReuseRetriever(retriever=LetterRetriever(), planner=ReusePlanner(), **options)
        results = [planned.invoke(f"{word} Which?") for word in (*WORDS, "bccab")]
        found[name] = {
            "orders": [[one.id for one in result] for result in results],
            "results": [shown(result) for result in results[1:3]],
            "rest": [digest(shown(result)) for result in results],
        }
    return found


@CASES
def retriever_ways() -> Any:
    """Async calls, batches, and other retrievers give the same in their way."""

    async def one_by_one() -> list[Any]:
        planned = ReuseRetriever(retriever=LetterRetriever(), planner=ReusePlanner())
        return [await planned.ainvoke(word) for word in WORDS]

    queries = [*_BATCH, "", "mnoabc"]
    planner = ReusePlanner()
    planned = ReuseRetriever(retriever=LetterRetriever(), planner=planner)
    once = planned.batch(queries)
    again = planned.batch(queries[::-1], {"configurable": {"tenant": "two"}})
    tenants = planned.batch(
        queries, [{"configurable": {"tenant": str(n % 2)}} for n in range(len(queries))]
    )
    other = ReuseRetriever(retriever=LetterRetriever(), planner=ReusePlanner(), annotation=True)
    return {
        "ainvoke": [digest(shown(result)) for result in asyncio.run(one_by_one())],
        "batch": [shown(result) for result in once[:3]] + [digest(shown(one)) for one in once],
        "another tenant": [[[one.id for one in result], digest(shown(result))] for result in again],
        "tenants": [[[one.id for one in result], digest(shown(result))] for result in tenants],
        "abatch": [digest(shown(result)) for result in asyncio.run(other.abatch(queries))],
    }


@CASES
def compressor() -> Any:
    """Documents that something else retrieved."""

    async def one_by_one(planned: ReuseCompressor) -> list[Any]:
        return [list(await planned.acompress_documents(documents(one), "?")) for one in WORDS]

    found: dict[str, Any] = {}
    for annotation in (False, True):
        planned = ReuseCompressor(planner=ReusePlanner(), annotation=annotation)
        results = [list(planned.compress_documents(documents(word), "?")) for word in WORDS]
        results += asyncio.run(one_by_one(planned))
        found[str(annotation)] = [[[one.id for one in r], digest(shown(r))] for r in results]
    around = ContextualCompressionRetriever(
        base_compressor=ReuseCompressor(planner=ReusePlanner()), base_retriever=LetterRetriever()
    )
    found["contextual compression"] = [shown(around.invoke(word)) for word in WORDS[:3]]
    return found


@CASES
def whose_request() -> Any:
    """Tenants and conversations, from the config and from the request context."""
    planned = ReuseRetriever(retriever=LetterRetriever(), planner=ReusePlanner())
    found: list[Any] = []
    for word in ("abc", "cba", "bad"):
        for said in ({}, {"tenant": "one"}, {"thread_id": "t1"}, {"tenant": "two", "thread_id": 7}):
            result = planned.invoke(word, {"configurable": said})
            found.append([one.id for one in result])
    with request_context(tenant="one", conversation_id="t2", history=HISTORY):
        found.append(shown(planned.invoke("bcd")))
    with request_context(tenant="one"):
        found.append(shown(planned.invoke("dcb")))
    return found


@CASES
def conversation() -> Any:
    """Turns of one conversation, with labels and without, as the model gets them."""
    found: dict[str, Any] = {}
    for labels in (False, True):
        inner = NotingModel()
        model = ReuseChatModel(inner=inner, planner=ReusePlanner(), window_s=0)
        history: list[Any] = []
        for word in ("abc", "bad", "ab", "xa"):
            text = format_context(documents(word), labels=labels)
            history.append(HumanMessage(f"{text}\n\n{word}?"))
            history.append(model.invoke(history, {"configurable": {"thread_id": "t1"}}))
        found["labels" if labels else "texts"] = inner.calls
    return found


@CASES
def contexts_as_text() -> Any:
    """`format_context`: as it is, in a template, under labels, in other words."""
    words = Templates(label="({letters})", block="{label}: {text}", separator="\n")
    found, xml = documents("dcab"), "<doc source={source}>\n{page_content}\n</doc>"
    inner = NotingModel()
    model = ReuseChatModel(inner=inner, planner=ReusePlanner(), window_s=0)
    for word in ("abc", "cab"):
        for options in ({"document_prompt": xml, "separator": "\n"}, {"label": "source"}):
            model.invoke(f"{format_context(documents(word), **options)}\n\nWhich?")
    return {
        "alone": format_context(found),
        "nothing": format_context([]),
        "separator": format_context(found[:2], separator="\n---\n"),
        "template": format_context(found[:2], xml),
        "labels": format_context(found, labels=True),
        "own labels": format_context(found[:2], label="source"),
        "one text twice": format_context(
            [*documents("a"), Document(text_of("a"))], labels=True, separator="; "
        ),
        "in other words": format_context(found[:2], labels=True, templates=words),
        "planned": inner.calls,
    }


@CASES
def chain() -> Any:
    """A retriever, a template and a model that know of each other's plans."""
    found: dict[str, Any] = {}
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Be brief."), ("human", "{context}\n\n{question}")]
    )
    for name, retrieves in (
        (
            "planned by the retriever",
            ReuseRetriever(retriever=LetterRetriever(), planner=ReusePlanner()),
        ),
        ("planned by the model", LetterRetriever()),
    ):
        model = NotingModel()
        steps = (
            {"context": retrieves | format_context, "question": RunnablePassthrough()}
            | prompt
            | ReuseChatModel(inner=model, planner=ReusePlanner(), window_s=0)
        )
        for word in ("abc", "cab", "bd"):
            steps.invoke(f"{word} Which?")
        steps.batch(["abd", "xyz", "dab"], {"max_concurrency": 1})
        found[name] = model.calls
    return found


def _calls(way: Callable[[ReuseChatModel, Any, Any], Any], **options: Any) -> list[Any]:
    """Return what a model is called with for some prompts, one after the other."""
    inner = NotingStream()
    model = ReuseChatModel(inner=inner, planner=ReusePlanner(), window_s=0, **options)
    for word in ("abc", "cab", "", "bde", "eb"):
        way(model, _question(word), {})
    history = [HumanMessage(_question("abc")), AIMessage("So."), HumanMessage(_question("bd"))]
    way(model, history[:1], {"configurable": {"thread_id": "t1"}})
    way(model, history, {"configurable": {"thread_id": "t1"}})
    said = {"tenant": "two", "thread_id": 3}
    way(model, _question("cba", tenant="two"), {"configurable": said})
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    call = AIMessage("", tool_calls=[{"name": "look", "args": {"x": 1}, "id": "1"}])
    parts: list[Any] = ["Look:", image, {"type": "text", "text": f" {_question('cab')}"}, "So?"]
    way(
        model,
        [
            SystemMessage(f"Known:\n{format_context(documents('fgh'))}"),
            HumanMessage(parts),
            call,
            ToolMessage(f"- {format_context(documents('xa'))} -", tool_call_id="1"),
            HumanMessage(f"{_question('hf')}\n{_question('gx')}", name="Ann"),
        ],
        {},
    )
    return inner.calls


@CASES
def model_calls() -> Any:
    """One call after the other, in each way to call a model."""

    def stream(model: ReuseChatModel, prompt: Any, config: Any) -> Any:
        return "".join(piece.text for piece in model.stream(prompt, config))

    def astream(model: ReuseChatModel, prompt: Any, config: Any) -> Any:
        async def pieces() -> str:
            return "".join([piece.text async for piece in model.astream(prompt, config)])

        return asyncio.run(pieces())

    ways: dict[str, Any] = {
        "invoke": lambda model, prompt, config: model.invoke(prompt, config),
        "ainvoke": lambda model, prompt, config: asyncio.run(model.ainvoke(prompt, config)),
        "stream": stream,
        "astream": astream,
    }
    found: dict[str, Any] = {"whole": _calls(ways["invoke"])}
    found |= {name: [digest(call) for call in _calls(way)] for name, way in ways.items()}
    for strategy in ("paper", "none"):
        calls = _calls(ways["invoke"], strategy=strategy)
        found[strategy] = [digest(call) for call in calls]
    return found


@CASES
def model_arguments() -> Any:
    """Tools, stop words, structured output, and what an engine is told beside the prompt."""

    @tool
    def look(where: str) -> str:
        """Look somewhere."""
        return where

    inner = NotingModel()
    model = ReuseChatModel(inner=inner, planner=ReusePlanner(), window_s=0)
    model.invoke(_question("abc"), stop=["."], temperature=0)
    model.bind_tools([look], tool_choice="look").invoke(_question("bac"))
    model.bind_tools([look]).batch([_question("cab"), _question("xba")], {"max_concurrency": 1})
    model.bind(seed=1).invoke(_question("cab"))
    engine = ReuseChatModel(
        inner=inner,
        planner=ReusePlanner(),
        window_s=0,
        send_cache_salt=True,
        send_session_id=True,
        salt_key="secret",
    )
    for said in ({}, {"tenant": "one"}, {"tenant": "one", "thread_id": "t"}, {"thread_id": 1}):
        asked = _question("ab", tenant=said.get("tenant"))
        engine.invoke(asked, {"configurable": said}, extra_body={"top_k": 1})
    return inner.calls


@CASES
def model_batches() -> Any:
    """Batches are sent in the planned order and answered in the caller's."""
    prompts: list[Any] = [_question(word, f"q{number}") for number, word in enumerate(_BATCH)]
    found: dict[str, Any] = {}

    def noted(name: str, run: Callable[[ReuseChatModel], Any], whole: bool = False) -> None:
        inner = NotingModel()
        answers = run(ReuseChatModel(inner=inner, planner=ReusePlanner(), window_s=60))
        calls = inner.calls if whole else [[digest(one), _end(one)] for one in inner.calls]
        found[name] = {"calls": calls, "answers": [str(getattr(a, "text", a)) for a in answers]}

    async def completed(model: ReuseChatModel) -> list[Any]:
        steps = model.abatch_as_completed(prompts, {"max_concurrency": 1})
        return [answer async for _, answer in steps]

    one = {"max_concurrency": 1}
    tenants = [{"configurable": {"tenant": str(n // 3)}, **one} for n in range(len(prompts))]
    failing = [*prompts[:3], _question("ab", "fail"), *prompts[3:]]
    noted("batch", lambda model: model.batch(prompts, one), whole=True)
    noted("abatch", lambda model: asyncio.run(model.abatch(prompts)))
    noted("abatch one by one", lambda model: asyncio.run(model.abatch(prompts, one)))
    of_tenants = [
        _question(word, f"q{number}", tenants[number]["configurable"]["tenant"])
        for number, word in enumerate(_BATCH)
    ]
    noted("tenants", lambda model: model.batch(of_tenants, tenants))
    noted("a failure", lambda model: model.batch(failing, one, return_exceptions=True))
    noted("twice", lambda model: model.batch(prompts, one) + model.batch(prompts[::-1], one))
    noted(
        "as completed",
        lambda model: [answer for _, answer in sorted(model.batch_as_completed(prompts, one))],
    )
    noted("abatch as completed", lambda model: asyncio.run(completed(model)))
    noted("threads", lambda model: model.batch(prompts))
    found["threads"]["calls"].sort()  # several are under way at a time
    return found


@CASES
def model_failures() -> Any:
    """The planner forgets what was planned for calls that fail before anything came."""
    told: list[Any] = []

    def note(model: ReuseChatModel, name: str, failure: BaseException | None) -> None:
        statistics = model.planner.statistics()
        told.append([name, type(failure).__name__, statistics.requests, statistics.tokens])

    for inner in (NotingModel(), NotingStream(), NotingStream(breaks_after=2)):
        model = ReuseChatModel(inner=inner, planner=ReusePlanner(), window_s=0)
        model.invoke(_question("abc"))
        ways: dict[str, Callable[[str], Any]] = {
            "invoke": model.invoke,
            "ainvoke": lambda prompt, model=model: asyncio.run(model.ainvoke(prompt)),
            "stream": lambda prompt, model=model: list(model.stream(prompt)),
            "astream": lambda prompt, model=model: asyncio.run(_all_of(model.astream(prompt))),
            "batch": lambda prompt, model=model: model.batch(
                [_question("mn", "q"), prompt, _question("mo", "q")], {"max_concurrency": 1}
            ),
        }
        for word, (name, way) in zip(
            ("xab", "ybc", "zca", "uab", "vca"), ways.items(), strict=True
        ):
            try:
                way(_question(word, "fail"))
            except (ConnectionError, TimeoutError) as error:
                note(model, name, error)
            else:
                note(model, name, None)
        told.append([digest(inner.calls), inner.calls[-1][-1]["content"][-40:]])
        model.invoke(_question("bxyzca"))
        told.append(inner.calls[-1])
    return told


async def _all_of(stream: Any) -> list[Any]:
    return [piece async for piece in stream]


@CASES
def model_calls_at_a_time() -> Any:
    """Calls of tasks and of threads that come together are planned together."""
    prompts = [_question(word, f"q{number}") for number, word in enumerate(_BATCH)]
    tasks, threads = NotingModel(), NotingModel()

    async def together() -> None:
        model = ReuseChatModel(inner=tasks, planner=ReusePlanner(), window_s=0.1)
        await asyncio.gather(*(model.ainvoke(prompt) for prompt in prompts))

    asyncio.run(together())
    model = ReuseChatModel(inner=threads, planner=ReusePlanner(), window_s=0.1, strategy="none")
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(model.invoke, prompts))
    return {
        "tasks": [[digest(call), _end(call)] for call in tasks.calls],
        "threads, sorted": sorted([digest(call), _end(call)] for call in threads.calls),
    }


def _end(call: list[Any]) -> str:
    return str(call[-1]["content"]).rsplit("\n", 1)[-1]


def _agent(answers: list[AIMessage], *tools: Any, **options: Any) -> tuple[Any, Scripted]:
    model = Scripted(responses=list(answers), seen=[])
    agent = create_agent(
        model,
        list(tools),
        system_prompt="Be brief.",
        middleware=[ReuseMiddleware(**options)],
        checkpointer=InMemorySaver(),
    )
    return agent, model


def _ask(agent: Any, text: str, **configurable: Any) -> Any:
    config = {"configurable": {"thread_id": "t1", **configurable}}
    return agent.invoke({"messages": [HumanMessage(text)]}, config)


@CASES
def agent_with_a_retriever_tool() -> Any:
    """Tool results are labelled once, and what was shown is only pointed to."""
    script = [
        searching(0, "ab"),
        searching(1, "bc", "cd"),
        AIMessage("Done."),
        searching(2, "cda"),
        AIMessage("Done again."),
    ]
    agent, model = _agent(script, search_tool(LetterRetriever()))
    _ask(agent, "First?")
    state = _ask(agent, "Second?")

    async def asynchronous() -> list[Any]:
        again, noting = _agent(script, search_tool(LetterRetriever()))
        for text in ("First?", "Second?"):
            await again.ainvoke(
                {"messages": [HumanMessage(text)]}, {"configurable": {"thread_id": "t1"}}
            )
        return noting.seen

    return {
        "calls": [digest(call) for call in model.seen],
        "last call": model.seen[-1],
        "state": messages_of(state),
        "async": [digest(call) for call in asyncio.run(asynchronous())],
    }


@CASES
def agent_with_context() -> Any:
    """What the middleware retrieves stands before each question, from any thread and tenant."""
    planner = ReusePlanner()
    done = [AIMessage(f"Answer {number}.") for number in range(9)]
    agent, model = _agent(done, retriever=LetterRetriever(), planner=planner)
    for text in ("abc One?", "bda Two?", " Nothing?"):
        _ask(agent, text)
    _ask(agent, "cab One?", thread_id="t2")
    _ask(agent, "cab One?", thread_id="t3", tenant="two")
    state = _ask(agent, "ef Three?")
    both, both_model = _agent(
        [searching(0, "ca"), AIMessage("Done.")],
        search_tool(
            LetterRetriever(),
            document_prompt=PromptTemplate.from_template("{source}: {page_content}"),
        ),
        retriever=ReuseRetriever(retriever=LetterRetriever(), planner=planner),
        planner=planner,
    )
    _ask(both, "ab Both?")
    nameless = Scripted(responses=[searching(0, "ab"), searching(1, "ba"), AIMessage("So.")])
    agent = create_agent(nameless, [search_tool(LetterRetriever())], middleware=[ReuseMiddleware()])
    agent.invoke({"messages": [HumanMessage("First?")]})
    return {
        "calls": model.seen,
        "state": messages_of(state)[-2:],
        "both": both_model.seen,
        "without a thread": nameless.seen,
    }


class KeepsTheNewest(AgentMiddleware[Any, Any, Any]):
    """Shows the model only the last messages, as what trims or summarizes does."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        """Leave out all but the newest messages."""
        return handler(request.override(messages=request.messages[-5:]))


@CASES
def agent_that_forgets() -> Any:
    """What was pointed to and is cut away is shown again where the pointer stood."""
    model = Scripted(
        responses=[
            searching(0, "abc"),
            searching(1, "bd"),
            searching(2, "cae"),
            searching(3, "dab"),
            AIMessage("Done."),
        ]
    )
    agent = create_agent(
        model,
        [search_tool(LetterRetriever())],
        middleware=[KeepsTheNewest(), ReuseMiddleware()],
        checkpointer=InMemorySaver(),
    )
    state = _ask(agent, "What?")
    return {"calls": model.seen[2:], "state": digest(messages_of(state))}


@CASES
def agent_with_other_tools() -> Any:
    """Plain text of named tools, memories as JSON, and results that are left alone."""

    @tool
    def search(query: str) -> Any:
        """Find something."""
        return {
            "1": '{"results": [{"id": "m1", "memory": "tea is liked", "score": 0.5}, '
            '{"id": "m2", "memory": "cats are kept", "score": 0.25}]}',
            "2": '{"results": [{"id": "m2", "memory": "cats are kept", "score": 0.75}, '
            '{"id": "m1", "memory": "tea is not liked", "score": 0.5}]}',
        }.get(query, "\n\n".join(query))

    script = [searching(0, "1", "2"), searching(1, "xy"), searching(2, "yz"), AIMessage("Done.")]
    found = {}
    for name, options in (("named", {"tools": ["search"]}), ("not named", {})):
        agent, model = _agent(script, search, **options)
        _ask(agent, "What?")
        found[name] = model.seen[-1]
    return found


@CASES
def planning_faults() -> Any:
    """Where planning fails, everything goes through as it is."""
    inner = NotingModel()
    model = ReuseChatModel(inner=inner, window_s=0, planner=FaultyPlanner())
    model.invoke(_question("abc"))
    model.batch([_question("ab"), _question("ba")], {"max_concurrency": 1})
    planned = ReuseRetriever(retriever=LetterRetriever(), planner=FaultyPlanner())
    agent, scripted = _agent(
        [searching(0, "ab"), AIMessage("Done.")],
        search_tool(LetterRetriever()),
        retriever=LetterRetriever(),
        planner=FaultyPlanner(),
    )
    _ask(agent, "cd What?")
    return {
        "model": inner.calls,
        "retriever": shown(planned.invoke("ba")),
        "agent": scripted.seen[-1],
        "faults": [model.faults, planned.faults],
    }
