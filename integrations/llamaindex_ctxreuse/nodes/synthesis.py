"""What plans say of nodes, where response synthesizers show the nodes to a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING
from llama_index.core.prompts.prompt_utils import get_biggest_prompt
from llama_index.core.response_synthesizers import (
    BaseSynthesizer,
    CompactAndRefine,
    SimpleSummarize,
    TreeSummarize,
)
from llama_index.core.response_synthesizers.compact_and_accumulate import CompactAndAccumulate
from llama_index.core.schema import NodeWithScore

from ctxreuse.adapters.formatting import PlanWords, words_of
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from llamaindex_ctxreuse.nodes.node_plans import planned_documents
from llamaindex_ctxreuse.nodes.span_listener import SpanListener

_SHOW_NODES_TOGETHER = (CompactAndRefine, TreeSummarize, SimpleSummarize, CompactAndAccumulate)


class PlannedNode(NodeWithScore):
    """A planned node whose plan's words a response synthesizer shows behind the nodes."""

    _templates: Templates = PrivateAttr(default=DEFAULT_TEMPLATES)

    __hash__ = None  # type: ignore[assignment]  # as its base class

    @classmethod
    def of(cls, scored: NodeWithScore, templates: Templates) -> PlannedNode:
        """Return a planned node in the words of these templates."""
        planned = cls(node=scored.node, score=scored.score)
        planned._templates = templates
        return planned

    @property
    def templates(self) -> Templates:
        """The words around the documents."""
        return self._templates

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NodeWithScore):
            return NotImplemented
        return self.node == other.node and self.score == other.score


@dataclass(slots=True)
class _Synthesis:
    """What a response synthesizer was given to show."""

    nodes: Sequence[NodeWithScore]
    templates: Templates
    is_worded: bool = False


class _SynthesisHandler(SpanListener):
    """Adds the words of plans to what a synthesizer is about to show."""

    _syntheses: dict[str, _Synthesis] = PrivateAttr(default_factory=dict)
    _fail_open: FailOpen = PrivateAttr(
        default_factory=lambda: FailOpen("ReusePostprocessor", "the ranking is not said", "wording")
    )

    @property
    def faults(self) -> int:
        """How many syntheses have shown planned nodes without words that they should have."""
        return self._fail_open.faults

    def entered(self, call: str, around: str, instance: object, arguments: dict[str, Any]) -> None:
        """Note a synthesis of planned nodes; add their words to the texts of one."""
        if not isinstance(instance, BaseSynthesizer):
            return
        nodes = arguments.get("nodes")
        if nodes is not None:
            planned = next((one for one in nodes if isinstance(one, PlannedNode)), None)
            if planned is not None:
                self._syntheses[call] = _Synthesis(list(nodes), planned.templates)
            return
        synthesis = self._syntheses.get(around)
        if synthesis is not None and not synthesis.is_worded:
            synthesis.is_worded = True
            self._fail_open.attempt(
                lambda: _add_words(instance, arguments, synthesis), lambda: None
            )

    def ended(self, call: str, result: object) -> None:
        """Forget a synthesis that has ended; count one that showed the nodes without words."""
        synthesis = self._syntheses.pop(call, None)
        if synthesis is not None and not synthesis.is_worded and _words(synthesis).all:
            self._fail_open.note(
                LookupError("LlamaIndex did not say which texts its synthesizer shows")
            )

    def failed(self, call: str) -> None:
        """Forget a synthesis that has failed."""
        self._syntheses.pop(call, None)


_HANDLER = _SynthesisHandler()


def show_words_in_syntheses() -> None:
    """Let response synthesizers show what plans say of `PlannedNode`s, from now on."""
    _HANDLER.listen()


def _add_words(
    synthesizer: BaseSynthesizer, arguments: dict[str, Any], synthesis: _Synthesis
) -> None:
    """Add the words of a plan to the texts, or the messages, that a synthesizer was given."""
    is_text = "text_chunks" in arguments
    chunks = arguments["text_chunks" if is_text else "message_chunks"]
    if not isinstance(chunks, list) or len(chunks) != len(synthesis.nodes):
        raise TypeError("LlamaIndex no longer passes a list with a text for each node")
    words = _words(synthesis)
    said = " ".join(words.all)
    if words.ranking is not None and isinstance(synthesizer, _SHOW_NODES_TOGETHER):
        further = [said] if is_text else [ChatMessage(content=said)]
        if _is_one_prompt(synthesizer, arguments["query_str"], [*chunks, *further]):
            chunks += further
            return
    if words.left_out:
        said = " ".join(words.left_out)
        if is_text:
            chunks[-1] += synthesis.templates.separator + said
        else:
            chunks[-1] = ChatMessage(blocks=[*chunks[-1].blocks, *ChatMessage(content=said).blocks])


def _words(synthesis: _Synthesis) -> PlanWords:
    return words_of(planned_documents(synthesis.nodes), synthesis.templates)


def _is_one_prompt(synthesizer: BaseSynthesizer, query: str, chunks: list[Any]) -> bool:
    """Return whether a synthesizer would show all these texts, or messages, in one prompt."""
    is_text = isinstance(chunks[0], str)
    prompt = get_biggest_prompt(
        [
            one.partial_format(query_str=query)
            for name, one in synthesizer._get_prompts().items()
            if name.startswith("chat_") != is_text
        ]
    )
    padding = getattr(synthesizer, "_response_padding_size", DEFAULT_PADDING)
    options: dict[str, Any] = {"padding": padding, "llm": synthesizer._llm}
    if not is_text:
        return len(synthesizer._chat_prompt_helper.repack(prompt, chunks, **options)) == 1
    text = "\n\n".join(one.strip() for one in chunks if one.strip())
    splitter = synthesizer._prompt_helper.get_text_splitter_given_prompt(prompt, **options)
    # a token is a byte at least, and counting them takes longer than the rest
    is_short = len(text.encode("utf-8", "surrogatepass")) <= splitter.chunk_size
    return is_short or len(splitter.split_text(text)) == 1
