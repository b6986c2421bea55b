"""Copies of components for other processes."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from llama_index.core.schema import BaseComponent


def state_without(component: BaseComponent, names: Set[str]) -> dict[Any, Any]:
    """Return what a component's copy in another process is made of: its fields but some.

    The copy has a planner of its own, for a planner is what one process has sent. LlamaIndex would
    take what cannot be copied out of the component itself.

    Args:
        component: The component.
        names: The fields that its copy sets up by itself.
    """
    fields = {name: one for name, one in vars(component).items() if name not in names}
    return {
        "__dict__": fields,
        "__pydantic_extra__": None,
        "__pydantic_fields_set__": component.model_fields_set - names,
        "__pydantic_private__": None,
    }
