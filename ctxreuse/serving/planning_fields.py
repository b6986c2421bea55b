"""Fields of components that plan, and what is made of them; their frameworks bring pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    ValidationInfo,
    field_validator,
)

from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.document_turn import DocumentPlanner, ItemKind
from ctxreuse.pipeline.engine_options import SESSION_HEADER, planner_for
from ctxreuse.pipeline.model_gateway import ModelGateway
from ctxreuse.pipeline.ordered_release import DEFAULT_WINDOW_S, checked_window
from ctxreuse.pipeline.prompt_turn import PromptStatistics
from ctxreuse.planner import ReusePlanner, Strategy, check_strategy
from ctxreuse.serving.client.own_calls import OwnCalls


class PlanningFields(BaseModel):
    """Fields that are set when a component is made, or for a copy; `_build` makes what plans."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    planner: ReusePlanner = Field(
        default=None, validate_default=True, exclude=True, repr=False, frozen=True
    )
    _held: ClassVar[str] = ""  # the field with what is wrapped

    @field_validator("planner", mode="before")
    @classmethod
    def _check_planner(cls, planner: object, fields: ValidationInfo) -> object:
        return planner_for(planner, model=fields.data.get("inner"))

    def model_post_init(self, context: Any, /) -> None:
        """Build what plans."""
        super().model_post_init(context)
        self._build()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values; those of what is wrapped change in a copy of that."""
        changes, kind = dict(update or {}), type(self)
        inside = changes.get(self._held, getattr(self, self._held, None))
        others = changes.keys() - kind.model_fields
        for name in sorted(others - set(getattr(type(inside), "model_fields", ()))):
            within = "" if inside is None else f" or of the {type(inside).__name__} inside"
            raise InvalidRequestError(
                f"{name!r} is no setting of {kind.__name__}{within}; leave it out"
            )
        if others:
            own = {name: changes.pop(name) for name in others}
            changes[self._held] = inside.model_copy(update=own, deep=deep)  # type: ignore[union-attr]
        copy: Self = super().model_copy(update=changes, deep=deep)
        if copy._is_built_from(changes):
            copy._build()
        return copy

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        # without a memo, pydantic before 2.14 copies what fields and private attributes hold twice
        return super().__deepcopy__({} if memo is None else memo)

    def _is_built_from(self, changes: Mapping[str, Any]) -> bool:
        return bool(changes)

    def _build(self) -> None:
        """Make of the fields what plans."""


class PlansDocuments(PlanningFields):
    """The fields of what puts documents into planned order."""

    annotation: bool = Field(default=False, frozen=True, strict=True)
    drop_repeats: bool = Field(default=False, frozen=True, strict=True)
    _documents: DocumentPlanner[Any] = PrivateAttr()
    _kind: ClassVar[ItemKind[Any]]

    @property
    def faults(self) -> int:
        """How often planning has failed and documents went through as they came."""
        return self._documents.fail_open.faults

    def _item_kind(self) -> ItemKind[Any]:
        return self._kind

    def _build(self) -> None:
        self._documents = DocumentPlanner(
            planner_for(self.planner),
            self._item_kind(),
            type(self).__name__,
            annotation=self.annotation,
            drop_repeats=self.drop_repeats,
        )


class PlansPrompts(PlanningFields):
    """The fields of a model around another one, which plans its prompts."""

    window_s: float = Field(default=DEFAULT_WINDOW_S, frozen=True)
    strategy: Strategy = Field(default="reuse", frozen=True)
    prime: bool = Field(default=False, frozen=True, strict=True)
    send_cache_salt: bool = Field(default=False, frozen=True, strict=True)
    send_session_id: StrictBool | Literal["group"] = Field(default=False, frozen=True)
    session_header: str = Field(default=SESSION_HEADER, frozen=True, strict=True)
    salt_key: str = Field(default="", exclude=True, repr=False, frozen=True, strict=True)
    find_retrieved: bool = Field(default=True, frozen=True, strict=True)
    _gateway: ModelGateway = PrivateAttr()
    _usage_of: ClassVar[Any]  # static: what an answer reports
    _follow_runs: ClassVar[Any]  # static: have what retrievers return known
    _adds_up: ClassVar[bool] = False  # see `ModelGateway`
    _held: ClassVar[str] = "inner"

    _check_window = field_validator("window_s", mode="before")(checked_window)
    _check_strategy = field_validator("strategy", mode="before")(check_strategy)

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts were sent as given."""
        return self._gateway.fail_open.faults

    @property
    def prompt_statistics(self) -> PromptStatistics:
        """What became of the contexts in its prompts: planned, left alone, and why."""
        return self._gateway.statistics()

    def _build(self) -> None:
        check_strategy(self.strategy)
        inner, planner = getattr(self, self._held), planner_for(self.planner)
        self._gateway = ModelGateway(
            planner,
            self.strategy,
            checked_window(self.window_s),
            type(self).__name__,
            " ".join(f"{one.__module__}.{one.__qualname__}" for one in type(inner).__mro__),
            self._usage_of,
            OwnCalls.beside(inner, planner.cache, primes=self.prime),
            self.prime,
            self._adds_up,
        )
        if self.find_retrieved:
            self._follow_runs()
