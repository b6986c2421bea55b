"""What the documentation takes from elsewhere when it is built, what it may not, and its list."""

from __future__ import annotations

import ast
import re
from html import unescape
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import typer
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from typer.cli import get_docs_for_click

from ctxreuse.cache.telemetry.collector import OF_PLANNERS, OF_REPLICAS
from ctxreuse.cli.command_line import app

ROOT = Path(__file__).resolve().parent.parent

COMMANDS, METRICS = "<!-- commands -->", "<!-- metrics -->"
PACKAGE = re.compile(r"^::: (\w+(?:\.\w+)?)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with the command line's help, or all metrics, in place of what asks for it."""
    markdown = re.sub(r"^`make docs` fills this page;.*\n\n", "", markdown, flags=re.MULTILINE)
    markdown = re.sub(METRICS, lambda _: metrics(), markdown)
    return re.sub(COMMANDS, lambda _: command_line(), markdown)


def metrics() -> str:
    """Return a table of the metrics of planners and of pools' engines."""
    owned = [*product(("`planner`",), OF_PLANNERS), *product(("`pool`, `replica`",), OF_REPLICAS)]
    return "| metric | labels | what it says |\n|---|---|---|\n" + "\n".join(
        f"| `{one.name}{'_total' * (one.kind == 'counter')}` | "
        f"{', '.join((own, *(f'`{label}`' for label in one.labels)))} | {one.help} |"
        for own, one in owned
    )


def command_line() -> str:
    """Return the help of every command, as the command itself prints it."""
    command = typer.main.get_command(app)
    command.name = "ctxreuse"
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="ctxreuse")
    # the page has a title, and a list of commands beside it
    text = text.removeprefix("# `ctxreuse`\n")
    text = re.sub(r"^\*\*Commands\*\*:\n\n(?:\* .*\n)+", "", text, flags=re.MULTILINE)
    return re.sub(r"<(int|float|str|path) ?\w*>", r"<\1>", text)


def on_env(env: Any, config: Any, files: Any, **_: Any) -> Any:
    """Add `llms.txt`, by which programs find pages: their titles, and how each begins."""
    [page] = (one.page for one in files.documentation_pages() if one.page.is_homepage)
    lines, section = [f"# {config.site_name}", "", f"> {config.site_description}"], ""
    while page := page.next_page:
        if page.parent.title != section:
            section = page.parent.title
            lines += ["", f"## {section}", ""]
        begins = re.search(r"<p>(.*?[.:])(?:\s.*?)?</p>", page.content, re.DOTALL)
        words = " ".join(unescape(re.sub("<.*?>", "", begins[1] if begins else "")).split())
        lines.append(f"- [{page.title}]({page.url}): {words}")
    files.append(File.generated(config, "llms.txt", content="\n".join([*lines, ""])))
    return env


class Assets(HTMLParser):
    """The addresses from which a page would load something when it is opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of an element's address, unless a reader has to click on it."""
        fields = dict(attrs)
        is_link = tag == "a" or (tag == "link" and fields.get("rel") in ("canonical", "next"))
        for name in () if is_link else ("src", "href", "srcset", "data"):
            self.addresses.append(fields.get(name) or "")


def public_names(package: str) -> list[str]:
    """Return a package's `__all__`, without importing it; nothing for a module."""
    for folder in (ROOT, ROOT / "integrations", ROOT / "agents"):
        path = folder.joinpath(*package.split("."), "__init__.py")
        if path.exists():
            code = ast.parse(path.read_text(encoding="utf-8"))
            assigned = [one for one in code.body if isinstance(one, ast.Assign)]
            for one in assigned:
                if ast.unparse(one.targets[0]) == "__all__":
                    return list(ast.literal_eval(one.value))
    return []


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Return a page as it is; refuse one that loads something from the network or is incomplete."""
    foreign = [one for one in Assets(output).addresses if re.match(r"(?:https?:)?//", one)]
    if foreign:
        raise PluginError(f"{page.file.src_uri} would load {foreign[0]} from the network")
    for package in PACKAGE.findall(page.markdown):
        missing = [name for name in public_names(package) if f'.{name}"' not in output]
        if missing:
            raise PluginError(f"{page.file.src_uri} lacks {missing[0]} of {package}")
    return output
