"""Arguments of components whose fields a framework's model class makes into arguments.

Such a class tells a mistake by an error of its own machinery, or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxreuse.errors import UnknownArgumentError


class NamedArguments:
    """Says which argument is meant, where one comes without a name or under another one.

    For classes with fields as pydantic has them; it stands before these among the bases.

    Raises:
        UnknownArgumentError: an argument without a name; or an unknown one, and one that is needed
            is missing.
    """

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, /, *args: Any, **fields: Any) -> None:
            kind, known = type(self).__name__, type(self).model_fields
            needed = [name for name, field in known.items() if field.is_required()]
            if args:
                name = needed[0] if needed else "planner"
                raise UnknownArgumentError(
                    f"{kind} takes its arguments by name; did you mean {kind}({name}=...)?"
                )
            missing = [name for name in needed if name not in fields]
            unknown = [name for name in fields if name not in known]
            if missing and unknown:
                raise UnknownArgumentError(
                    f"{kind} has no argument {unknown[0]!r:.60}; did you mean {missing[0]}=...?"
                )
            super().__init__(**fields)
