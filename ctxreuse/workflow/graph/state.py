"""What a run knows: values by key, never changed in place."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ctxreuse.workflow.errors import StateKeyError, quoted


class State(Mapping[str, Any]):
    """The values of a run, with how often nodes have written them and were visited.

    Users read it as a mapping. What nodes write gives a new state: whoever holds an old one, such
    as a stage under way, sees no change. Values are shared between states, so do not change them.

    Args:
        values: The values that the run begins with. Their version is 0.
        versions: How often each key was written.
        visits: How often each node has run.
    """

    __slots__ = ("_values", "_versions", "_visits")

    speculative = False
    """Whether some values are only expected so far."""

    def __init__(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        versions: Mapping[str, int] | None = None,
        visits: Mapping[str, int] | None = None,
    ) -> None:
        self._values: Mapping[str, Any] = dict(values or {})
        self._versions = Counter(versions)
        self._visits = Counter(visits)

    def __getitem__(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            raise StateKeyError(
                f"the state has no {quoted([key])}; it has {quoted(self)}. "
                "Read it with state.get, or give it a value with defaults={...}",
                key=key,
            ) from None

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({quoted(self)})"  # values may be whole documents

    def visits(self, node: str) -> int:
        """Return how often a node has run."""
        return self._visits[node]

    def version(self, key: str) -> int:
        """Return how often nodes have written a key; 0 for what only the run began with."""
        return self._versions[key]

    def commit(self, writes: Mapping[str, Any], visited: Iterable[str]) -> State:
        """Return the state after a wavefront; this one stays as it is.

        Args:
            writes: What its nodes have written.
            visited: The nodes that have run, each once.
        """
        return State(
            {**self._values, **writes},
            versions=self._versions + Counter(writes.keys()),
            visits=self._visits + Counter(visited),
        )

    def overlay(self, writes: Mapping[str, Any]) -> Overlay:
        """Return this state as it would be if those values had been written."""
        return Overlay(self, writes)


class Overlay(State):
    """A state with values that are only expected so far. It is read, and never committed on.

    Args:
        state: What is known. It is no overlay: speculation goes one stage deep.
        writes: What is expected to be written.
    """

    __slots__ = ()

    speculative = True

    def __init__(self, state: State, writes: Mapping[str, Any]) -> None:
        assert not state.speculative, "speculation on speculation"
        self._values = ChainMap(dict(writes), state._values)  # type: ignore[arg-type]  # only read
        self._versions = state._versions + Counter(writes.keys())
        self._visits = state._visits

    def commit(self, writes: Mapping[str, Any], visited: Iterable[str]) -> State:
        """Fail: what is only expected is not committed on."""
        raise AssertionError("a commit on a speculative state")
