"""What the commands print on terminals of any width."""

import re

import pytest

from ctxreuse.cli.terminal import progress, show
from ctxreuse.measure.table import Table

ARM = "annotated: before the documents: {order}"
TABLE = Table(
    "How good the answers are",
    ("", "questions", "F1", "F1, change", "exact, change"),
    (
        ("as retrieved", "1,200", "0.512", "", ""),
        (ARM, "1,200", "0.498", "-0.014\n[-0.031, +0.003]", "-0.010\n[-0.024, +0.004]"),
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


HEADED = Table(
    "Prefilled",
    ("order", *(f"{size:,} tokens" for size in (10_000, 20_000, 30_000, 40_000, 50_000))),
    (("without",), ("as retrieved", "1", "2", "3", "4", "5"), ("ours", "6", "7", "8", "9", "10")),
)


@pytest.mark.parametrize("columns", [30, 40, 50])
def test_the_cells_of_a_table_that_is_too_wide_stand_below_each_other(monkeypatch, capsys, columns):
    text = shown(monkeypatch, capsys, columns, HEADED)
    lines = [line.split("│")[1:3] for line in text.splitlines() if line.startswith("│")]
    assert [name.strip() for name, _ in lines] == [
        *("without", "as retrieved", *HEADED.head[1:], "ours", *HEADED.head[1:])
    ]
    numbers = [int(number) for _, number in lines if number.strip()]
    assert numbers == list(range(1, 11))


def test_words_that_need_more_width_stand_below_each_other(monkeypatch, capsys):
    table = Table(
        "Requests that lost most",
        ("request", "cause", "closest", "shared", "parts at"),
        (("request-17", "other order", "request-3", "1,200 tokens", "a-very-long-name#12"),),
        is_text=True,
    )
    text = shown(monkeypatch, capsys, 60, table)
    assert all(word in text for word in ("request-17", "1,200 tokens", "a-very-long-name#12"))
    assert [line.count("│") for line in text.splitlines() if "cause" in line] == [3]
    assert "│ request │ cause" not in text


def test_a_file_gets_eighty_columns_unless_somebody_says_more(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    show([HEADED, "word " * 40])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    show([HEADED])
    assert re.search("ours +│ +6 │ +7 │", capsys.readouterr().out)


def test_progress_says_nothing_in_a_file(capsys):
    with progress("measuring", 3) as advance:
        for _ in range(3):
            advance()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["estimate", "bench", "plan"])
def test_help_on_a_narrow_terminal_cuts_no_name(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 60
