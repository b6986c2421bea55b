"""What the commands print on terminals of any width."""

import re

import pytest

from ctxreuse.cli.terminal import show
from ctxreuse.evaluation.results.tables import Good, Table

ARM = "annotated: before the documents: {numbers}"
TABLE = Table(
    "How good the answers are",
    ("", "questions", "F1", "F1, change", "exact, change"),
    (
        ("as retrieved", "1,200", "0.512", "", ""),
        (ARM, "1,200", "0.498", Good("-0.014\n[-0.031, +0.003]"), "-0.010\n[-0.024, +0.004]"),
    ),
)
NUMBERS = ("1,200", "0.512", "0.498", "-0.014", "[-0.031,", "+0.003]", "[-0.024,", "+0.004]")


def shown(monkeypatch, capsys, columns, table=TABLE):
    monkeypatch.setenv("FORCE_COLOR", "1")  # it is a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    show([table])
    text = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, text.splitlines())) <= columns
    return text


@pytest.mark.parametrize("columns", [60, 72, 80, 100])
def test_a_narrow_terminal_shows_all_numbers(monkeypatch, capsys, columns):
    text = shown(monkeypatch, capsys, columns)
    assert all(number in text for number in NUMBERS)
    assert "…" not in text
    names = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert "".join(names).replace(" ", "") == f"as retrieved{ARM}".replace(" ", "")


def test_names_are_broken_before_intervals(monkeypatch, capsys):
    text = shown(monkeypatch, capsys, 90)
    assert "[-0.031, +0.003]" in text
    assert ARM not in text


def test_a_wide_terminal_breaks_nothing(monkeypatch, capsys):
    text = shown(monkeypatch, capsys, 120)
    assert f"│ {ARM} │" in text
    assert "[-0.031, +0.003]" in text


def test_numbers_are_shortened_where_nothing_else_is_left_to_do(monkeypatch, capsys):
    assert "…" in shown(monkeypatch, capsys, 40)


def test_a_table_without_a_frame_is_as_narrow(monkeypatch, capsys):
    plain = Table("", TABLE.head, TABLE.rows)
    text = shown(monkeypatch, capsys, 55, plain)
    assert all(number in text for number in NUMBERS)
