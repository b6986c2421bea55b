"""Reports: results as JSON, as a page, and as pictures."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from browsers import chromium
from cli_helpers import words
from jinja2 import UndefinedError
from test_estimate import replay

from ctxreuse import ContextBlock
from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.html_page import HtmlPage
from ctxreuse.measure.replay.policies import AS_SENT, OURS_ONLINE
from ctxreuse.measure.replay.simulate import TraceSummary, estimate
from ctxreuse.measure.report import page, write_report
from ctxreuse.measure.report.report_page import charts
from ctxreuse.measure.results.results import results_of
from ctxreuse.measure.results.verdict import verdict
from ctxreuse.measure.traces.trace_files import TraceRequest

CHARTS = {"prefilled", "tree"}
HOSTILE = "<script>alert(1)</script>$x^$\ud800\x00"


def results(ids=("a", "b", "c", "d"), turns=True, capacities=(None, 20_000)):
    blocks = [ContextBlock(id=one, text=f"text of {one}", tokens=5_000) for one in ids]
    trace = [
        TraceRequest(
            request_id=f"{ids[0]} {number}",
            query="Why?",
            blocks=tuple(blocks[number % 3 :] + blocks[: number % 3]),
            conversation_id=number % 2 if turns else None,
            turn=number // 2,
        )
        for number in range(8)
    ]
    again = replay(trace)
    runs = list(estimate(again, capacities))
    return results_of(
        "Some <trace>", "blocks", TraceSummary.of(trace), runs, runs[-1].planned, again.corpus
    )


@pytest.fixture(scope="module")
def measured():
    return results()


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.elements, self.addresses, self.marks = [], [], {}
        self._figure = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        fields = dict(attrs)
        self.elements.append(tag)
        self.addresses += [fields[name] for name in ("src", "href", "xlink:href") if name in fields]
        if tag == "figure":
            self._figure = fields["id"]
        elif tag in ("path", "use", "text") and self._figure:
            self.marks[self._figure] = self.marks.get(self._figure, 0) + 1


def test_results_make_the_same_page_each_time(measured):
    assert page(measured) == page(measured)


def test_a_page_holds_all_it_shows(measured):
    text = page(measured)
    found = Page(text)
    assert "script" not in found.elements
    assert all(address.startswith("#") for address in found.addresses)
    assert "url(http" not in text
    assert set(found.marks) == CHARTS
    assert all(marks > 15 for marks in found.marks.values())
    assert "Some &lt;trace&gt;" in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)


def test_a_page_says_who_measured_what_and_when(measured):
    stamped = replace(
        measured, command="ctxreuse estimate <rec>", date="2026-11-25", python="3.11.7"
    )
    text = page(stamped)
    assert "<title>What ctxreuse saves: Some &lt;trace&gt;</title>" in text
    assert (
        f"2026-11-25; <code>ctxreuse estimate &lt;rec&gt;</code>; ctxreuse {measured.version}, "
        "Python 3.11.7"
    ) in text
    assert text.index(verdict(measured).sentence) < text.index("<table") < text.index("<figure")


def test_every_line_has_its_name_below_the_axes(measured):
    computed, tree = charts(measured)
    assert (computed.name, tree.name) == ("prefilled", "tree")
    (legend,) = computed.figure().legends
    names = [text.get_text() for text in legend.get_texts()]
    policies = {one.policy for one in measured.part() if one.deduplicated}
    assert policies - {"as retrieved"} <= set(names)
    lines = computed.figure().axes[0].lines
    looks = {(one.get_color(), one.get_linestyle()) for one in lines}
    assert len(looks) == len(lines) == len(names)


def test_the_tree_shows_nothing_below_prompts_that_end_and_breaks_no_word():
    ids = "ordinary", "Donaudampfschifffahrtsgesellschaftskapitän"
    axes = charts(results(ids))[1].figure().axes[0]
    assert {round(-(one.get_y() + one.get_height() / 2)) for one in axes.patches} == {0, 1}
    said = {word for one in axes.texts for word in one.get_text().split() if "…" not in word}
    assert {word for word in said if word.isalpha()} <= {"text", "of", *ids}


QUESTIONS = ("Which river flows through Paris?", "Which bridge is the oldest of all?")


def named_results(orders, titles=None):
    texts = {f"0a1b2c3d-{n}": f"The {name} is a river. " * 40 for n, name in enumerate(NAMES)}
    blocks = [ContextBlock(id=one, text=text, tokens=400) for one, text in texts.items()]
    corpus = {one.id: one for one in blocks}
    trace = [
        TraceRequest(f"9f8e7d6c-{n}", QUESTIONS[n % 2], tuple(blocks[one] for one in order))
        for n, order in enumerate(orders)
    ]
    policy = replace(OURS_ONLINE, strategy="none")
    runs = list(estimate(replay(trace), [None], (AS_SENT, policy)))
    shown_plans = runs[1].planned
    return results_of("named", "blocks", TraceSummary.of(trace), runs, shown_plans, corpus, titles)


NAMES = ("Seine", "Tiber", "Tagus")


def test_people_read_questions_and_first_words_and_find_ids_where_they_point():
    results = named_results([(0, 1, 2), (1, 0, 2)])
    (miss,) = results.misses
    assert miss.question == QUESTIONS[1]
    assert miss.place == (
        f"Begins unlike “{QUESTIONS[0]}”, which has most in common with it; then has “The Tiber "
        "is a river. The Tiber is a river. The Tiber is a…” where that one has “The Seine is a "
        "river. The Seine is a river. The Seine is a…”."
    )
    text = page(results)
    seen = re.sub(r'<title>[^<]*</title>|title="[^"]*"', "", text)
    assert "9f8e7d6c-1" in text
    assert "0a1b2c3d-1" in text
    assert "9f8e7d6c" not in seen
    assert "0a1b2c3d" not in seen


def test_titles_name_blocks_and_misses_stand_under_their_cause_with_a_remedy():
    titles = {"0a1b2c3d-0": "Rivers: Seine", "0a1b2c3d-1": "Rivers: Tiber"}
    results = named_results([(0, 1, 2), (1, 0, 2)], titles)
    assert "then has “Rivers: Tiber” where that one has “Rivers: Seine”" in results.misses[0].place
    assert {child.label for child in results.tree.children} == {"Rivers: Seine", "Rivers: Tiber"}

    results = named_results([(0, 1, 2), (1, 0, 2), (0, 1, 2), (2, 1, 0)])
    assert results.causes[0].cause == "other order"
    text = page(results)
    heading = text.index("<h3>Other order: ")
    assert heading < text.index("Plan such requests together (plan_batch") < text.index('"misses"')


def test_what_a_corpus_is_called_cannot_act_in_a_page(tmp_path):
    write_report(results((HOSTILE, "b", "c", "d")), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not [letter for letter in text if letter < " " and letter != "\n"]


def test_a_page_allows_inline_styles_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "shown_pages").mkdir()
    (tmp_path / "shown_pages" / "one.html.j2").write_text(
        '{% extends "html_page.html.j2" %}\n'
        "{% macro twice(text) %}{{ text }}, {{ text | loud }}{% endmacro %}\n"
        "{% block title %}{{ text }}{% endblock %}\n"
        "{% block body %}\n<p>{{ twice(text) }}</p>\n{% endblock %}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shown = HtmlPage(
        "shown_pages", "one.html.j2", feature="a page", extra="report", filters={"loud": str.upper}
    )
    text = shown.render(text="<b>\r\n\ud800\x00\u202e")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in text
    assert 'style="color-scheme: light dark"' in text
    assert "<title>&lt;b&gt;\n\ufffd\ufffd\ufffd</title>" in text
    assert "<p>&lt;b&gt;\n\ufffd\ufffd\ufffd, &lt;B&gt;\n\ufffd\ufffd\ufffd</p>" in text
    with pytest.raises(UndefinedError):
        shown.render()


def test_a_page_says_what_to_install_for_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    shown = HtmlPage("ctxreuse", "one.html.j2", feature="a picture", extra="agents")
    with pytest.raises(MissingExtraError, match=r"a picture .*\[agents\]'"):
        shown.render()


@pytest.mark.slow
def test_the_commands_write_the_same_page(run, measured, tmp_path):
    corpus, trace = tmp_path / "corpus.jsonl", tmp_path / "trace.jsonl"
    corpus.write_text("".join(json.dumps({"id": n, "tokens": 9_000}) + "\n" for n in range(4)))
    trace.write_text(
        "".join(
            json.dumps({"request_id": n, "blocks": [n % 4, (n + 1) % 4, (n + 2) % 4]}) + "\n"
            for n in range(12)
        )
    )
    html, again = (tmp_path / name for name in ("one.html", "two.html"))
    code, _, err = run("estimate", trace, "--html", html)
    assert (code, err) == (0, f"ctxreuse: wrote {html}\n")
    code, _, err = run("report", trace, "-o", again, "--pictures", tmp_path / "pictures")
    assert code == 0
    assert f"ctxreuse: wrote {tmp_path / 'pictures' / 'tree.png'}" in err
    first, second = (words(path.read_text()) for path in (html, again))
    assert first.partition("Next:")[2][:400] == second.partition("Next:")[2][:400]
    assert first.count("<figure") == second.count("<figure") == 2


@pytest.fixture
def browser():
    return chromium()


@pytest.mark.slow
@pytest.mark.parametrize("ids", [("a", "b", "c", "d"), (HOSTILE, "b", "c", "d")])
def test_a_browser_opens_it_without_complaint(tmp_path, browser, ids):
    write_report(results(ids), tmp_path / "report.html")
    opened = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom", (tmp_path / "report.html").as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in opened.stderr
    found = Page(opened.stdout)
    assert all(marks > 15 for marks in found.marks.values())
    assert set(found.marks) == CHARTS
