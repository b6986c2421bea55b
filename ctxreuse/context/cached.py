"""A property that is computed once, as in `functools`, without the lock that Python 3.11 gives it.

That lock belongs to the class, not to the object: in a process that was forked while another thread
computed the property of any object, it would never be free again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["cached_property"]

if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property:  # noqa: N801 - as functools names it
        """Computes an attribute when it is first asked for; two threads may both compute it."""

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute = compute
            self._name = compute.__name__
            self.__doc__ = compute.__doc__

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._compute(instance)
            return value
