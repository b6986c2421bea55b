"""Fields that a config can set, of a wrapper and of what is inside it, and what bindings hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable, RunnableConfigurableFields
from langchain_core.runnables.utils import AnyConfigurableField, ConfigurableFieldSpec


def without_bindings(runnable: object) -> object:
    """Return what is inside `bind`, `with_config` and fields that a config can set."""
    while isinstance(runnable, (RunnableBindingBase, DynamicRunnable)):
        runnable = runnable.default if isinstance(runnable, DynamicRunnable) else runnable.bound
    return runnable


def configurable_around(
    wrapper: RunnableSerializable[Any, Any],
    held: str,
    own: Callable[..., RunnableSerializable[Any, Any]],
    fields: Mapping[str, AnyConfigurableField],
) -> RunnableSerializable[Any, Any]:
    """Return a wrapper whose fields a config can set, and those of what is inside."""
    inside = getattr(wrapper, held)
    known = getattr(type(inside), "model_fields", {}).keys() - type(wrapper).model_fields
    if isinstance(inside, RunnableConfigurableFields):
        known = known | type(inside.default).model_fields.keys()
    of_inside = {name: one for name, one in fields.items() if name in known}
    made = own(**{name: one for name, one in fields.items() if name not in known})
    if not of_inside:
        return made
    assert isinstance(made, RunnableConfigurableFields)
    return _ConfigurableWrapper(
        default=wrapper,
        fields=made.fields,
        held=held,
        inside=inside.configurable_fields(**of_inside),
    )


class _ConfigurableWrapper(RunnableConfigurableFields):  # type: ignore[type-arg]  # see below
    """A wrapper with fields that a config can set in what is inside, too."""

    held: str
    # with type arguments, pydantic would make what it holds anew
    inside: RunnableConfigurableFields  # type: ignore[type-arg]

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        return [*super().config_specs, *self.inside.config_specs]

    def configurable_fields(self, **kwargs: AnyConfigurableField) -> RunnableSerializable[Any, Any]:
        return self.default.configurable_fields(**{**self.inside.fields, **self.fields, **kwargs})

    def _prepare(
        self, config: RunnableConfig | None = None
    ) -> tuple[Runnable[Any, Any], RunnableConfig]:
        wrapper, config = super()._prepare(config)
        inside, config = self.inside._prepare(config)
        if inside is not self.inside.default:
            assert isinstance(wrapper, RunnableSerializable)
            wrapper = wrapper.model_copy(update={self.held: inside})
        return wrapper, config
