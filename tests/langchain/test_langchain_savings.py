"""What `planner.savings` says of a wrapped model: the usage of its answers, and its failures."""

import re
from itertools import permutations
from types import SimpleNamespace

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_model_helpers import RecordingModel, configured, model, openai_model, question

from ctxreuse import ReusePlanner
from ctxreuse.serving import EmulatedEngine
from langchain_ctxreuse import ReuseChatModel

ORDERS = ["".join(letters) for letters in permutations("abc")]


def wrapped(**fields):
    engine = EmulatedEngine(block_size=4)
    planner = ReusePlanner(tenant_class={"acme": "paid"})
    return engine, planner, model(openai_model(engine, **fields), planner=planner)


async def calls(llm, prompts, way, config=None):
    if way == "invoke":
        return [llm.invoke(one, config) for one in prompts]
    if way == "ainvoke":
        return [await llm.ainvoke(one, config) for one in prompts]
    if way == "stream":
        return [list(llm.stream(one, config)) for one in prompts]
    if way == "astream":
        return [[piece async for piece in llm.astream(one, config)] for one in prompts]
    if way == "batch":
        return llm.batch(list(prompts), config)
    return await llm.abatch(list(prompts), config)


@examples(40)
@given(
    st.lists(st.permutations("abcd"), min_size=1, max_size=6),
    st.sampled_from(("reuse", "none")),
    st.sampled_from(("active", "shadow")),
    st.booleans(),
)
def test_nothing_is_saved_where_every_prompt_is_sent_as_given(orders, strategy, mode, has_heading):
    inner, planner = RecordingModel(), ReusePlanner(mode=mode)
    llm = model(inner, planner=planner, strategy=strategy)
    prompts = [question("".join(letters)) for letters in orders]
    if has_heading:  # which the application writes by hand between all, so that nothing is moved
        prompts = [re.sub(r"(\w says)", r"Heading:\n\1", one) for one in prompts]
    for one in prompts:
        llm.invoke(one)
    savings, is_changed = planner.savings, [one.text for one in inner.calls] != prompts
    assert not (is_changed and (strategy == "none" or mode == "shadow" or has_heading))
    if mode == "shadow" and strategy == "reuse":
        return  # it counts what would be saved
    assert (savings.changed > 0) == is_changed
    if not is_changed:
        assert savings.saved_tokens == savings.error_tokens == 0
        assert not re.search(r"[1-9].*% fewer", str(savings))


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream", "batch", "abatch"])
async def test_the_usage_of_each_answer_is_counted_once(way):
    engine, planner, llm = wrapped()
    await calls(llm, [question(letters) for letters in ORDERS], way)
    savings = planner.savings
    assert savings.requests == savings.reported.answers == len(ORDERS)
    assert savings.reported.prompt_tokens == engine.usage.prompt_tokens
    assert savings.reported.cached_tokens == engine.usage.cached_tokens > 0
    assert savings.reported.expected_cached_tokens == savings.cached_as_sent > 0


class Silent(BaseChatModel):
    """Answers without usage; the call of a prompt with "fail" fails."""

    @property
    def _llm_type(self):
        return "silent"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        if "fail" in messages[-1].text:
            raise ValueError("failed")
        return SimpleNamespace(
            generations=[ChatGeneration(message=AIMessage("Yes."))], llm_output=None
        )

    def _stream(self, messages, stop=None, run_manager=None, **kwargs):
        yield from (ChatGenerationChunk(message=AIMessageChunk(one)) for one in ("Yes", "."))


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream", "batch", "abatch"])
async def test_each_answer_without_usage_counts_as_unreported_once(way):
    planner = ReusePlanner(tenant_class={"acme": "paid"})
    llm = ReuseChatModel(inner=Silent(), planner=planner)
    await calls(llm, [question(letters) for letters in ORDERS], way, configured(tenant="acme"))
    assert planner.savings.reported.unreported == len(ORDERS)
    assert planner.savings.by_class["paid"].reported.unreported == len(ORDERS)
    stream = llm.stream("abc")
    next(stream)
    stream.close()
    with pytest.raises(ValueError, match="failed"):
        llm.invoke("fail")
    assert planner.savings.reported.unreported == len(ORDERS)  # of no whole answer


def test_prompts_without_a_context_are_counted():
    engine, planner, llm = wrapped()
    for _ in range(3):
        llm.invoke("Where is Paris?")
    assert planner.savings.prompts_without_context == 3
    assert planner.savings.requests == 0
    assert planner.savings.reported.prompt_tokens == engine.usage.prompt_tokens


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([(1_000, 3), (0, 4), (0, 5)], id="its own tokens, as Gemini does"),
        pytest.param([(1_000, 3), (1_000, 7), (1_000, 12)], id="all tokens so far"),
    ],
)
def test_what_pieces_of_a_stream_tell_counts_once(pieces):
    class Parted(Silent):
        """Tells usage in each piece."""

        def _stream(self, *_, **__):
            for tokens, out in pieces:
                usage = {"input_tokens": tokens, "output_tokens": out, "total_tokens": tokens + out}
                piece = AIMessageChunk(content="O", usage_metadata=usage)
                yield ChatGenerationChunk(message=piece)

    told = []
    planner = ReusePlanner(tracing=SimpleNamespace(planned=lambda *_: None, answered=told.append))
    assert list(ReuseChatModel(inner=Parted(), planner=planner).stream("Where is Paris?"))
    assert (told[0].prompt_tokens, told[0].completion_tokens) == (1_000, 12)


def test_cached_tokens_in_a_providers_own_words_count():
    class DeepSeek(Silent):
        """Tells cached tokens where LangChain's usage has no name for them."""

        def _generate(self, *_, **__):
            usage = {"input_tokens": 1_000, "output_tokens": 3, "total_tokens": 1_003}
            told = {"prompt_tokens": 1_000, "prompt_cache_hit_tokens": 640, "completion_tokens": 3}
            message = AIMessage("So.", usage_metadata=usage)
            generations = [ChatGeneration(message=message)]
            return ChatResult(generations=generations, llm_output={"token_usage": told})

    planner = ReusePlanner()
    ReuseChatModel(inner=DeepSeek(), planner=planner).invoke("Where is Paris?")
    reported = planner.savings.reported
    assert (reported.answers, reported.prompt_tokens, reported.cached_tokens) == (1, 1_000, 640)
