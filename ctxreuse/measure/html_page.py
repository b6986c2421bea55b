"""Pages of HTML that load nothing and run nothing, whatever text they show."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class HtmlPage:
    """A page, rendered from a template that lies in a package."""

    package: str
    template: str
    feature: str
    extra: str
    filters: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def render(self, **values: Any) -> str:
        """Return the page for some values, all of which are escaped."""
        return legible(self._template.render(values))

    @cached_property
    def _template(self) -> Template:
        try:
            from jinja2 import Environment, FunctionLoader, StrictUndefined
        except ImportError as error:
            raise MissingExtraError(self.feature, self.extra) from error
        environment = Environment(
            loader=FunctionLoader(self._source),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= self.filters
        return environment.get_template(self.template)

    def _source(self, name: str) -> str:
        package = __package__ if name == BASE_TEMPLATE else self.package
        return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def legible(text: str) -> str:
    """Return a text with what cannot be shown replaced, so that it can be written as UTF-8."""
    return _ILLEGIBLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))
