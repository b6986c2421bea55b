"""What the commands print on terminals of any width."""

import re

import pytest
from cli_helpers import run

from ctxreuse.cli.terminal import ProgressLines, progress, show
from ctxreuse.measure.table import Good, Table

__all__ = ["run"]

ARM = "annotated: before the documents: {order}"
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
    whole = f"as retrieved{ARM}".replace(" ", "")  # in each table of some of the columns
    assert "".join(names).replace(" ", "") == whole * text.count("How good the answers are")


def test_columns_that_do_not_fit_stand_in_a_table_of_their_own(monkeypatch, capsys):
    text = shown(monkeypatch, capsys, 60)
    assert "How good the answers are (continued)" in text
    assert "[-0.031, +0.003]" in text
    assert "How good the answers are (continued)" not in shown(monkeypatch, capsys, 90)


HEADED = Table(
    "Prefilled",
    ("order", *(f"{size:,} tokens" for size in (10_000, 20_000, 30_000, 40_000, 50_000))),
    (("without",), ("as retrieved", "1", "2", "3", "4", "5"), ("ours", "6", "7", "8", "9", "10")),
)


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_headings_stand_in_every_part_of_a_table(monkeypatch, capsys, columns):
    text = shown(monkeypatch, capsys, columns, HEADED)
    assert text.count("without") == text.count("Prefilled")
    cells = re.findall(r"(?:as retrieved|ours) *│((?: *\d+ *│)+)", text)
    numbers = [int(number) for row in cells for number in re.findall(r"\d+", row)]
    assert sorted(numbers) == list(range(1, 11))


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
    assert "(continued)" not in capsys.readouterr().out


def test_progress_in_a_file_is_a_line_now_and_then(capsys):
    now = iter(range(0, 10_000, 4))
    lines = ProgressLines("measuring", 10, lambda: next(now))
    for _ in range(10):
        lines.advance()
    assert capsys.readouterr().err.splitlines() == [
        "ctxreuse: measuring: 20%, about 32 s left",
        "ctxreuse: measuring: 40%, about 24 s left",
        "ctxreuse: measuring: 60%, about 16 s left",
        "ctxreuse: measuring: 80%, about 8 s left",
    ]


def test_what_takes_no_time_says_nothing(capsys):
    with progress("measuring", 3) as advance:
        for _ in range(3):
            advance()
    assert capsys.readouterr().err == ""


def test_names_are_broken_before_intervals(monkeypatch, capsys):
    text = shown(monkeypatch, capsys, 90)
    assert "[-0.031, +0.003]" in text
    assert ARM not in text


def test_a_wide_terminal_breaks_nothing(monkeypatch, capsys):
    text = shown(monkeypatch, capsys, 120)
    assert f"│ {ARM} │" in text
    assert "[-0.031, +0.003]" in text


def test_numbers_are_shortened_where_nothing_else_is_left_to_do(monkeypatch, capsys):
    assert "…" in shown(monkeypatch, capsys, 16)


def test_a_table_without_a_frame_is_as_narrow(monkeypatch, capsys):
    plain = Table("", TABLE.head, TABLE.rows)
    text = shown(monkeypatch, capsys, 55, plain)
    assert all(number in text for number in NUMBERS)


@pytest.mark.parametrize("command", ["estimate", "bench", "export", "plan"])
def test_help_on_a_narrow_terminal_cuts_no_name(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 60
