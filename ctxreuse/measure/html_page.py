"""Pages of HTML that load nothing and run nothing, whatever text they show."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from ctxreuse.context.fork_safety import cached_property
from ctxreuse.errors import MissingExtraError

if TYPE_CHECKING:
    from jinja2 import Template

BASE_TEMPLATE = "html_page.html.j2"
"""What a page's template extends; its blocks are `title`, `style` and `body`."""

# Controls, lone surrogates, noncharacters, and the two overrides of writing direction
_ILLEGIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\u202d\u202e]"
)


class HtmlPage:
    """A page, rendered from a template that lies in a package."""

    def __init__(
        self,
        package: str,
        template: str,
        *,
        feature: str,
        extra: str,
        filters: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._package = package
        self._name = template
        self._feature = feature
        self._extra = extra
        self._filters = dict(filters or {})

    def render(self, **values: Any) -> str:
        """Return the page for some values, all of which are escaped."""
        return legible(self._template.render(values))

    @cached_property
    def _template(self) -> Template:
        try:
            from jinja2 import Environment, FunctionLoader, StrictUndefined
        except ImportError as error:
            raise MissingExtraError(self._feature, self._extra) from error
        environment = Environment(
            loader=FunctionLoader(self._source),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= self._filters
        return environment.get_template(self._name)

    def _source(self, name: str) -> str:
        package = __package__ if name == BASE_TEMPLATE else self._package
        return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def legible(text: str) -> str:
    """Return a text with what cannot be shown replaced, so that it can be written as UTF-8."""
    return _ILLEGIBLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))
