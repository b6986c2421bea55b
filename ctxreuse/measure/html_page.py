"""Pages of HTML that load nothing and run nothing, whatever text they show."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctxreuse.context.fork_safety import cached_property
from ctxreuse.errors import MissingExtraError

if TYPE_CHECKING:
    from jinja2 import Template

# Controls, lone surrogates, noncharacters, and the two overrides of writing direction
_ILLEGIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\u202d\u202e]"
)


@dataclass(frozen=True)
class HtmlPage:
    """A page, rendered from a template that lies in a package and extends `html_page.html.j2`."""

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
            from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
        except ImportError as error:
            raise MissingExtraError(self.feature, self.extra) from error
        environment = Environment(
            loader=ChoiceLoader([PackageLoader(one, "") for one in (self.package, __package__)]),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= self.filters
        return environment.get_template(self.template)


def legible(text: str) -> str:
    """Return a text with what cannot be shown replaced, so that it can be written as UTF-8."""
    return _ILLEGIBLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))
