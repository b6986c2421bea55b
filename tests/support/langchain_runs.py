"""A handler of LangChain's that records what ran inside what, and how it ended."""

from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler


class Runs(BaseCallbackHandler):
    """Records runs as paths of names, such as "chain > model", with their tags.

    Attributes:
        paths: All runs, in the order in which they began.
        tags: Their tags.
        ended: The runs that ended, in that order, with what they gave or the error they raised.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.tags: list[list[str]] = []
        self.ended: list[tuple[str, Any]] = []
        self._paths: dict[UUID, str] = {}

    def _begin(self, run_name: str, run_id: UUID, outer: UUID | None, tags: Any) -> None:
        path = run_name if outer is None else f"{self._paths[outer]} > {run_name}"
        self._paths[run_id] = path
        self.paths.append(path)
        self.tags.append(tags)

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, name: str, **kwargs: Any
    ) -> None:
        self._begin(name, run_id, kwargs["parent_run_id"], kwargs["tags"])

    on_retriever_start = on_chain_start

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any
    ) -> None:
        self._begin("model", run_id, kwargs["parent_run_id"], kwargs["tags"])

    def on_chain_end(self, given: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.ended.append((self._paths[run_id], given))

    on_retriever_end = on_retriever_error = on_llm_error = on_chain_error = on_chain_end

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.on_chain_end(response.generations[0][0].text, run_id=run_id)

    @property
    def errors(self) -> list[str]:
        """Return what raised which kind of error."""
        return [
            f"{path}: {type(how).__name__}"
            for path, how in self.ended
            if isinstance(how, BaseException)
        ]
