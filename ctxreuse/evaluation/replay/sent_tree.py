"""The prefix tree of the sent prompts, for a picture: its top levels and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.replay.simulate import sent_blocks
from ctxreuse.evaluation.traces.trace_files import Corpus, block_tokens

_DEPTH = 5
_LEAST_SHARE = 0.004


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A block in the prefix tree.

    Attributes:
        name: The block's id; empty for the root.
        requests: Prompts that go through this node.
        sent_tokens: Block tokens of these prompts.
        children: The next blocks, the heaviest first; light ones are left out.
    """

    name: str
    requests: int
    sent_tokens: int
    children: tuple[TreeNode, ...] = ()

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return a node of what `dataclasses.asdict` made of one."""
        children = tuple(cls.from_json(child) for child in fields["children"])
        return cls(fields["name"], fields["requests"], fields["sent_tokens"], children)


@dataclass(slots=True)
class _Growing:
    requests: int = 0
    sent_tokens: int = 0
    children: dict[tuple[type, str | int], _Growing] = field(default_factory=dict)

    def add(self, tokens: int) -> None:
        self.requests += 1
        self.sent_tokens += tokens


def sent_tree(planned: Sequence[PlannedRequest], corpus: Corpus) -> TreeNode:
    """Return the top of the tree of the prompts' blocks; a later turn begins at the root.

    Args:
        planned: What was sent.
        corpus: The blocks.
    """
    root = _Growing()
    for request in planned:
        blocks = sent_blocks(request, corpus)
        tokens = sum(map(block_tokens, blocks))
        node = root
        node.add(tokens)
        for block in blocks[:_DEPTH]:
            node = node.children.setdefault((type(block.id), block.id), _Growing())
            node.add(tokens)
    return _grown("", root, _LEAST_SHARE * root.sent_tokens)


def _grown(name: str, node: _Growing, least: float) -> TreeNode:
    children = sorted(node.children.items(), key=lambda item: (-item[1].sent_tokens, str(item[0])))
    return TreeNode(
        name,
        node.requests,
        node.sent_tokens,
        tuple(
            _grown(str(block_id), child, least)
            for (_, block_id), child in children
            if child.sent_tokens >= least
        ),
    )
