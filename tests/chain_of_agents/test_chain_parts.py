"""The parts of a chain: segments, budgets, outcomes, prompts, placement, memory."""

import copy
import pickle
import tracemalloc
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from chain_helpers import Agents, word_count
from langchain_core.documents import Document as LangChainDocument
from llama_index.core.schema import Document as LlamaIndexDocument
from llama_index.core.schema import NodeWithScore, TextNode

from chain_of_agents import Answer, ChainPrompts, ManagerError, Step, Trace, agent_placement
from chain_of_agents.agent_memory import AgentMemory, AgentTurn, ConversationKey
from chain_of_agents.agent_placement import AgentPlacement, placed
from chain_of_agents.chain_prompts import note_after
from chain_of_agents.requests import budget_of, clipped, clipped_together, history_tokens
from chain_of_agents.segments import as_blocks, pieces_of, segments_of
from chain_of_agents.trace.steps import failure_of, outcome_of
from ctxreuse import PAPER_TEMPLATES, ContextBlock, ReusePlanner, Templates
from ctxreuse.context.blocks import text_digest
from ctxreuse.context.lru_map import PartSize
from ctxreuse.errors import EngineError, InvalidRequestError
from ctxreuse.serving.pool import placement as pool_placement
from ctxreuse.serving.pool.placement import Document, DocumentAffinity


class TestDocuments:
    def test_all_kinds_of_documents_become_blocks_with_their_own_ids(self):
        block = ContextBlock(id=7, text="seven")
        given = [
            "plain",
            block,
            {"id": 1, "text": "one"},
            {"text": "without id"},
            LangChainDocument(id="lc", page_content="langchain"),
            LangChainDocument(page_content="langchain without id", metadata={"id": "no"}),
            TextNode(id_="node", text="node", metadata={"source": "not shown"}),
            NodeWithScore(node=TextNode(id_="scored", text="scored"), score=0.5),
            LlamaIndexDocument(id_="whole", text="whole"),
        ]
        assert [(one.id, one.text) for one in as_blocks(given)] == [
            (ContextBlock(text="plain").id, "plain"),
            (7, "seven"),
            (1, "one"),
            (ContextBlock(text="without id").id, "without id"),
            ("lc", "langchain"),
            (ContextBlock(text="langchain without id").id, "langchain without id"),
            ("node", "node"),
            ("scored", "scored"),
            ("whole", "whole"),
        ]

    def test_the_same_id_and_text_counts_once_and_other_texts_or_kinds_of_id_do_not(self):
        given = [{"id": i, "text": t} for i, t in [(1, "a"), ("1", "a"), (1, "b"), (1, "a")]]
        assert [(one.id, one.text) for one in as_blocks(given)] == [(1, "a"), ("1", "a"), (1, "b")]


class TestPieces:
    def test_a_short_or_empty_document_is_left_as_it_is_whatever_its_token_count_says(self):
        block = ContextBlock(id="d", text="one two three")
        assert pieces_of(block, 3, word_count) == [block]
        block = ContextBlock(id="e", text="", tokens=10**9)
        assert pieces_of(block, 32, word_count) == [block]

    def test_a_long_one_is_cut_at_paragraphs_then_sentences_then_characters_and_keeps_every_space(
        self,
    ):
        text = "One two three. Four.\n\n Five  six seven eight nine. Ten\n"
        pieces = pieces_of(ContextBlock(id="d", text=text), 5, word_count)
        assert [(one.id, one.text) for one in pieces] == [
            ("d (1/4)", "One two three. Four.\n\n"),
            ("d (2/4)", " Five  six seven "),
            ("d (3/4)", "eight nine. "),
            ("d (4/4)", "Ten\n"),
        ]
        pieces = pieces_of(ContextBlock(id="x", text="x" * 25), 10, len)
        assert [len(one.text) for one in pieces] == [10, 10, 5]

    @pytest.mark.parametrize("text", ["a  b  c   d    e", "  x  " * 9, "\n\n\n\na\n\n\nb", "   "])
    def test_text_that_counts_no_tokens_is_neither_lost_nor_doubled(self, text):
        block = ContextBlock(text=text, tokens=1_000)
        assert "".join(one.text for one in pieces_of(block, 2, word_count)) == text


class TestSegments:
    BLOCKS = tuple(ContextBlock(id=letter, text=letter) for letter in "abcdef")

    def cut(self, agents: list[int], budget: int, label: int, one_each: bool) -> list[Any]:
        parcels = [[n] for n in range(6)]
        segments = segments_of(self.BLOCKS, parcels, agents, [10] * 6, budget, label, one_each)
        return [(one.agent, "".join(map(str, (b.id for b in one.blocks)))) for one in segments]

    def test_a_share_is_read_in_the_order_of_first_pieces_in_segments_that_are_not_too_long(self):
        assert self.cut([2, 0, 2, 1, 0, 2], 100, 0, False) == [(2, "acf"), (0, "be"), (1, "d")]

        assert self.cut([0, 0, 0, 0, 0, 1], 20, 0, False) == [
            (0, "ab"),
            (0, "cd"),
            (0, "e"),
            (1, "f"),
        ]
        assert self.cut([0] * 6, 25, 5, False) == [(0, "ab"), (0, "cd"), (0, "ef")]
        assert self.cut([0] * 6, 24, 5, False) == [(0, letter) for letter in "abcdef"]
        agents = [1, 1, 0, 0, 1, 0]
        assert self.cut(agents, 100, 0, True) == list(zip(agents, "abcdef", strict=True))


def budget(asked: str = "q", window: int = 1_000, is_counted: bool = True, **options: Any) -> Any:
    planner: Any = SimpleNamespace(
        counts_tokens=is_counted, count_tokens=word_count, templates=Templates()
    )
    agents = Agents(**{"note_tokens": 10, "answer_tokens": 20, **options})
    return budget_of(asked, window, agents.settings, planner)


class TestBudget:
    def test_a_segment_has_the_same_room_for_all_usual_questions_and_what_is_asked_for(self):
        assert budget("q").segment == budget("q " * 256).segment
        assert budget("q " * 257).segment == budget("q").segment - 1
        assert budget("q " * 257).cut == budget("q").cut
        assert budget("q " * 381, is_counted=False).segment == budget(is_counted=False).cut
        assert budget().segment - budget(is_counted=False).segment == 250
        assert budget(segment_tokens=50).segment == 50
        assert budget(segment_tokens=50_000).segment == budget().segment
        long = ChainPrompts(first="word " * 100 + "{question}")
        assert budget(prompts=long).segment == budget().segment - 101 + word_count(
            ChainPrompts().next
        )

    @pytest.mark.parametrize(
        ("templates", "label", "location", "line"),
        [
            # "[BCDF] ", a blank line; a ranking names three labels, for which there is room
            (Templates(), 9, len(", [BCDF]"), len("See also [BCDF] above.\n\n")),
            (Templates(most_ranked=6), 9 + len(", [BCDF]"), 8, 24),
            (Templates(most_ranked=None), 9 + len(", [BCDF]"), 8, 24),
            (
                PAPER_TEMPLATES,
                13 + len(" > [Doc_bcdf]"),
                len("Please refer to [Doc_bcdf] in the previous conversation.\n\n"),
                0,
            ),
        ],
    )
    def test_labels_and_words_count_as_the_templates_have_them(
        self, templates, label, location, line
    ):
        planner = ReusePlanner(token_counter=len, templates=templates)
        allowed = budget_of("q", 10_000, Agents().settings, planner)
        assert (allowed.label, allowed.location, allowed.location_line) == (label, location, line)

    def test_where_there_is_no_room_for_a_segment_the_error_says_what_to_do(self):
        with pytest.raises(InvalidRequestError) as refused:
            budget("many words " * 500)
        assert str(refused.value) == (
            "a model with room for 1000 tokens has none for a segment, beside instructions, a "
            "question of 1000 tokens, notes of 10 and an answer of 20; ask a shorter question, or "
            "lower note_tokens or answer_tokens"
        )

    def test_texts_are_cut_at_their_ends_only_if_they_are_too_long(self):
        assert clipped("a b c", 3, word_count) == "a b c"
        assert clipped("a b c d", 3, word_count) == "a b ..."
        assert clipped("abc", 0, len) == " ..."
        texts = ["a", "b b b b b b", "c c", "d d d d d"]
        assert clipped_together(texts, 99, word_count) == texts
        assert clipped_together(texts, 9, word_count) == ["a", "b b ...", "c c", "d d ..."]
        assert clipped_together([], 9, word_count) == []
        history = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
        assert history_tokens(history, word_count) == 3 + 2 * 8


class TestOutcomes:
    @pytest.mark.parametrize(
        ("text", "outcome"),
        [
            ("A note.", "answered"),
            ("答え", "answered"),
            ("no " * 23, "answered"),
            ("", "empty"),
            (None, "garbage"),
            ("!!! ??? ...", "garbage"),
            ("no " * 24, "garbage"),
            ("\ud800" * 5 + "a", "garbage"),
        ],
    )
    def test_what_a_text_is(self, text, outcome):
        assert outcome_of(text) == outcome

    def test_timeouts_are_found_in_causes_and_only_our_errors_are_quoted(self):
        class ReadTimeoutError(Exception):
            pass

        wrapped = EngineError("x")
        wrapped.__cause__ = ReadTimeoutError()
        assert failure_of(TimeoutError()) == ("timed out", "TimeoutError")
        assert failure_of(wrapped) == ("timed out", "x")
        assert failure_of(ValueError()) == ("failed", "ValueError")
        assert failure_of(ValueError("the secret document")) == ("failed", "ValueError")
        assert failure_of(EngineError("e0 did not answer")) == ("failed", "e0 did not answer")


class TestPrompts:
    @pytest.mark.parametrize(
        ("name", "template"),
        [
            ("first", "no field"),
            ("first", "{question} {question}"),
            ("next", "{question} {note}"),
            ("note", "{note}"),
            ("final", "{notes} {question} {"),
            ("worker", None),
            ("manager", 3),
            ("no_notes", b""),
        ],
    )
    def test_a_template_with_other_fields_is_refused_by_its_name(self, name, template):
        with pytest.raises(InvalidRequestError, match=rf"the chain's prompt {name} is "):
            ChainPrompts(**{name: template})


class Engines:
    def __init__(self, *names: str) -> None:
        self.names = names
        self.down: set[str] = set()
        self.cache_epochs = dict.fromkeys(names, 0)

    def available(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.down)

    def cache_epoch(self, engine: str) -> int:
        return self.cache_epochs[engine]


def some(*names: str) -> list[Document]:
    return [Document(ContextBlock(id=name, text=name).key, 100) for name in names]


class TestPlacement:
    def test_a_document_stays_with_its_agent_or_with_that_of_its_conversation(self):
        placement = AgentPlacement(5, Engines("a", "b"), DocumentAffinity)
        first = placement.assign(some("x", "y", "z"), "", {})
        assert placement.assign(some("z", "x", "y"), "", {}) == [first[2], first[0], first[1]]
        x, y = some("x", "y")
        [before, _] = placement.assign([x, y], "", {})
        other = (before + 1) % 5
        assert placement.assign([x], "", {x.key: other}) == [other]

    def test_no_agent_on_an_engine_that_is_down_gets_documents_unless_all_are(self):
        engines = Engines("a", "b")
        placement = AgentPlacement(4, engines, DocumentAffinity)
        placement.assign(some("x"), "", {})
        engines.down = {"a"}
        shown = {one.key: agent for one, agent in zip(some("p", "q"), (0, 1), strict=True)}
        agents = placement.assign(some("x", "y", "z", "p", "q"), "", shown)
        assert {placement.lives_on[agent] for agent in agents} == {"b"}
        engines.down = {"a", "b"}
        assert len(placement.assign(some("x", "y"), "", {})) == 2

    def test_an_emptied_engine_s_agents_have_read_nothing(self):
        forgotten: list[Any] = []

        class Affinity(DocumentAffinity):
            def forget_agent(self, agent: Any) -> None:
                forgotten.append(agent)

        engines = Engines("a", "b")
        placement = AgentPlacement(4, engines, Affinity)
        placement.assign(some("x"), "", {})
        engines.cache_epochs["a"] += 1
        placement.assign(some("y"), "", {})
        assert forgotten == [agent for agent in range(4) if placement.lives_on[agent] == "a"]

    def test_other_tenants_do_not_count(self):
        busy, quiet = (AgentPlacement(5, Engines("a"), DocumentAffinity) for _ in range(2))
        busy.assign(some(*"abcdefgh"), "other", {})
        assert busy.assign(some("x", "y"), "t", {}) == quiet.assign(some("x", "y"), "t", {})

    def test_a_tenants_many_documents_take_no_other_tenants_away(self, monkeypatch):
        monkeypatch.setattr(agent_placement, "_MAX_DOCUMENTS", 20)
        monkeypatch.setattr(agent_placement, "_MAX_TENANTS", 3)
        engines = Engines("a", "b")
        placement = AgentPlacement(5, engines, DocumentAffinity)
        read = some(*"klmnop")
        placement.assign(read, "quiet", {})
        kept = placement._assigners.peek(text_digest("quiet").hex())
        assert isinstance(kept, DocumentAffinity)
        for number in range(100):
            placement.assign(some(*(f"{number} {n}" for n in range(number % 9))), "loud", {})
            assert all(size.entries <= size.bound for size in placement.parts.values())
            assert len(kept._readers) == 6
        assert placement.parts == {"tenants": PartSize(2, 3), "documents": PartSize(20, 20)}
        for number in range(5):
            placement.assign(some("x"), f"tenant {number}", {})
        assert placement.parts == {"tenants": PartSize(3, 3), "documents": PartSize(3, 20)}
        engines.cache_epochs = {"a": 1, "b": 1}
        placement.assign([], "", {})
        assert placement.parts["documents"] == PartSize(0, 20)

    def test_agents_are_spread_evenly_over_the_engines_that_there_are(self):
        before = placed(range(15), ["a", "b", "c"], {})
        assert sorted(before.values()) == ["a"] * 5 + ["b"] * 5 + ["c"] * 5
        after = placed(range(15), ["a", "c"], before)
        moved = [agent for agent in range(15) if before[agent] != after[agent]]
        assert [before[agent] for agent in moved] == ["b"] * 5
        assert sorted(after.values()) in (["a"] * 8 + ["c"] * 7, ["a"] * 7 + ["c"] * 8)
        assert sorted(placed([0, 1], ["a", "b", "c"], {})) == [0, 1]
        with pytest.raises(EngineError, match="no engine any more; add"):
            AgentPlacement(2, Engines(), DocumentAffinity).assign(some("x"), "", {})

    def test_nobody_waits_while_very_many_documents_are_assigned(self, monkeypatch):
        engines: Any = SimpleNamespace(
            names=("e",), available=lambda: ("e",), cache_epoch=lambda name: 0
        )
        placement = AgentPlacement(4, engines, DocumentAffinity)
        documents = [Document(ContextBlock(text=f"d{n}").key, 100) for n in range(200)]
        score, others = pool_placement._score, []

        def scored(*args: Any) -> bytes:
            if not others:
                others.append(None)  # what the other tenant asks for is scored, too
                other = Thread(target=lambda: others.append(placement.assign(few, "b", {})))
                other.start()
                other.join(10)
                assert len(others) == 2, "another tenant has waited"
            return score(*args)

        few = documents[:2]
        expected = AgentPlacement(4, engines, DocumentAffinity).assign(documents, "a", {})
        placement.assign(few, "c", {})  # the agents are placed on the engines
        monkeypatch.setattr(pool_placement, "_score", scored)
        note, noted = DocumentAffinity.note, []
        counted = lambda self, *many: noted.append(len(many[0])) or note(self, *many)  # noqa: E731
        monkeypatch.setattr(DocumentAffinity, "note", counted)
        assert placement.assign(documents, "a", {}) == expected
        assert max(noted) < 100 < sum(noted)
        assert placement.parts["documents"].entries == 204
        assert placement.assign(documents, "a", {}) == expected, "they stay where they were read"


KEY = ConversationKey("", "c")
A, B = (ContextBlock(id=name, text=name).key for name in "ab")


def turn(prompt: str, answer: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}


class TestHistories:
    def test_a_turn_that_begins_anew_replaces_its_agents_history(self):
        memory = AgentMemory()
        memory.record(KEY, [AgentTurn(0, (), "p1", "a1", (A,)), AgentTurn(1, (), "p", "a", (B,))])
        memory.record(KEY, [AgentTurn(0, (), "p2", "a2")])
        assert memory.history(KEY, 0) == turn("p2", "a2")
        assert memory.shown(KEY) == {B: 1}

    def test_the_oldest_conversation_is_forgotten_and_one_alone_keeps_to_the_bound(self):
        memory = AgentMemory(max_conversations=2)
        first, second, third = (KEY._replace(id=name) for name in ("c1", "c2", "c3"))
        for key in (first, second, first, third):
            memory.record(key, [AgentTurn(0, (), "p", "a", (A,))])
        assert memory.history(second, 0) == ()
        assert [memory.forget(key) for key in (first, second, third)] == [True, False, True]

        memory = AgentMemory(max_characters=10_000)
        for _ in range(30):
            memory.record(KEY, [AgentTurn(0, memory.history(KEY, 0), "x" * 700, "a")])
            assert memory.parts["conversation_characters"].entries <= 10_000
        assert memory.history(KEY, 0), "it began anew"

    def test_a_tenants_many_or_long_conversations_take_no_other_tenants_away(self):
        memory = AgentMemory(max_conversations=20, max_characters=100_000)
        quiet = ConversationKey("quiet", "c")
        memory.record(quiet, [AgentTurn(0, (), "p", "a", (A,))])
        for number in range(200):
            prompt = "x" * (number % 9 * 2_000)
            loud = ConversationKey("loud", f"{number % 50}" * (number % 40))
            memory.record(loud, [AgentTurn(1, memory.history(loud, 1), prompt, "", (A, B))])
            assert all(size.entries <= size.bound for size in memory.parts.values())
        assert memory.parts["conversation_characters"].entries > 50_000
        assert memory.history(quiet, 0) == turn("p", "a")
        assert memory.shown(quiet) == {A: 0}


class TestAnswersAndErrors:
    TRACE = Trace(question="q", mode="parallel", steps=(Step(role="worker", agent=0, position=0),))

    def test_answers_and_errors_pickle_and_copy_with_their_trace(self):
        answer = Answer("In France.", self.TRACE)
        for again in (pickle.loads(pickle.dumps(answer)), copy.copy(answer), copy.deepcopy(answer)):
            assert again == "In France."
            assert type(again) is Answer
            assert again.trace == self.TRACE
        assert answer.upper() == "IN FRANCE."
        assert {str(answer): 1}[answer] == 1
        error = ManagerError("the manager did not answer", self.TRACE)
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert str(again) == "the manager did not answer"
            assert again.trace == self.TRACE

    def test_a_trace_sums_what_the_models_told(self):
        steps = (
            Step(role="worker", agent=3, position=0, prompt_tokens=5, cached_tokens=2, ended_s=1.0),
            Step(role="worker", agent=1, position=1, outcome="failed", error="E", ended_s=4.0),
            Step(role="manager", agent=-1, position=-1, note="yes", prompt_tokens=7, ended_s=3.0),
        )
        trace = Trace(question="q", mode="sequential", steps=steps)
        assert [step.name for step in trace.steps] == ["worker 3", "worker 1", "manager"]
        assert (trace.prompt_tokens, trace.cached_tokens, trace.duration_s) == (12, 2, 4.0)
        assert (trace.answer, trace.workers, trace.failures) == ("yes", steps[:2], steps[1:2])


def test_a_word_of_any_length_in_a_reply_takes_no_more_memory_than_it_is_long():
    reply = "x" * 20_000

    tracemalloc.start()
    note = note_after(ChainPrompts(), "k1 is v1.", reply, "What are the values?")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert note == f"k1 is v1.\n{reply}"
    assert most < 200 * len(reply)  # all its beginnings together would be 10,000 times as long
