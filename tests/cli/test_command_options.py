"""Commands that are made of configurations."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import typer
from typer.testing import CliRunner

from ctxreuse.cli.terminal import PrintsJson, command_of
from ctxreuse.measure.options import option

GIVEN = []


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is looked at."""

    path: str = option("Where it is.", argument=True)
    sizes: Sequence[int] = option("Sizes.", (), "--size", min=1)
    url: str | None = option("An address.", None, secret=True)
    quick: bool = option("Be quick.", False)
    key: str = field(default="none", repr=False)


@dataclass(frozen=True, kw_only=True)
class Look(PrintsJson, Config):
    """Look at something.

    `look PATH`
    """

    more: int = option("More.", 3)

    def run(self) -> None:
        GIVEN.append(self)


@pytest.fixture
def look():
    app = typer.Typer()
    app.command()(command_of(Look))
    GIVEN.clear()
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_a_command_takes_what_its_configuration_describes_and_nothing_else(look):
    assert look("p", "--size", "2", "--size", "3", "--quick", "--url", "u").exit_code == 0
    assert [Look(path="p", sizes=(2, 3), url="u", quick=True)] == GIVEN
    assert look("p").exit_code == 0
    assert GIVEN[1:] == [Look(path="p")]
    for wrong in (("p", "--size", "0"), (), ("p", "--key", "k")):
        assert look(*wrong).exit_code == 2


def test_its_help_is_that_of_the_class_with_json_last(look):
    told = look("--help").output
    assert "Look at something." in told
    names = ("--size", "--url", "--quick", "--more", "--json")
    places = [told.index(name) for name in names]
    assert places == sorted(places)


def test_what_may_hold_a_password_is_in_no_repr():
    assert "user:word" not in repr(Look(path="p", url="http://user:word@host"))
