"""The page of a chain's trace, taken apart again with the standard library's parser."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest

from chain_of_agents import Step, Trace
from chain_of_agents.trace import trace_page
from ctxreuse.errors import MissingExtraError

VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = (
    '<script>alert(1)</script></details></main><img src="http://evil.example/x" onerror=alert(1)>'
    "\"' onmouseover='alert(2) {{ 7 * 7 }} &amp; \x00\x1b[31m\x85 \ud800 \u202egnp.exe \ufffe"
)


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        parts = (one if isinstance(one, str) else f" {one.text} " for one in self.children)
        return re.sub(r"\s+", " ", "".join(parts)).strip()

    def all(self, tag: str = "", css: str = "") -> list[Element]:
        found: list[Element] = []
        for child in self.children:
            if isinstance(child, Element):
                classes = (child.attributes.get("class") or "").split()
                if tag in ("", child.tag) and (not css or css in classes):
                    found.append(child)
                found += child.all(tag, css)
        return found

    def one(self, tag: str = "", css: str = "") -> Element:
        [found] = self.all(tag, css)
        return found


class Reader(HTMLParser):
    """Builds a tree, and fails on tags that are not closed in the order they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        assert len(element.attributes) == len(attrs), "an attribute stands twice"
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read(html: str) -> Element:
    html.encode()  # no lone surrogates
    reader = Reader()
    reader.feed(html)
    reader.close()
    [root] = reader.open
    return root


def shown(*steps: Step, question: str = "Why?", mode: str = "sequential") -> Element:
    return read(Trace(question=question, mode=mode, steps=steps).to_html())


def worker(position: int, **given: object) -> Step:
    values = {"agent": position, "note": f"note {position}", **given}
    return Step(role="worker", position=position, **values)


def manager(**given: object) -> Step:
    values = {"note": "Because.", **given}
    return Step(role="manager", agent=-1, position=-1, **values)


def facts(step: Element) -> list[str]:
    return [one.text for one in step.one(css="facts").all("dd")]


def rows(step: Element) -> list[str]:
    return [one.text for one in step.all(css="row")]


def headline(tree: Element) -> list[str]:
    return [one.text for one in tree.one("dl", "numbers").all("div")]


def test_a_call_is_shown_with_all_that_its_step_holds():
    step = worker(
        0,
        agent=3,
        documents=("d1", "d2", 7),
        shown_before=("d1",),
        labels={"[KQTZ]": "d1", "[GNEW]": "d2", "[HZZJ]": 7, "[FWCR]": "7"},
        remark="its history was left out",
        replica="engine-2",
        prompt_tokens=1200,
        cached_tokens=900,
        completion_tokens=1,
        began_s=0.25,
        ended_s=1.5,
    )
    card = shown(step).one("li", "step")
    assert card.one("h3").text == "1 · worker 3 ✓ answered"
    assert facts(card) == [
        "engine-2",
        "1,200 tokens",
        "900 tokens (75%)",
        "1 token",
        "1.25 s, from 250 ms",
    ]
    assert rows(card) == [
        "Remark its history was left out",
        "Read [GNEW] d2 [HZZJ] 7",
        "Only pointed to [KQTZ] d1",
        "Other labels [FWCR] 7",
    ]
    assert card.one(css="note").text == "note 0"


def test_of_two_texts_under_one_id_the_one_may_be_read_and_the_other_pointed_to():
    labels = {"[KQTZ]": "d1", "[GNEW]": "d1"}
    card = shown(worker(0, documents=("d1", "d1"), shown_before=("d1",), labels=labels))
    assert rows(card.one("li", "step")) == [
        "Read [KQTZ] [GNEW] d1",
        "Only pointed to [KQTZ] [GNEW] d1",
    ]


def test_the_head_shows_question_answer_and_numbers():
    tree = shown(
        worker(0, prompt_tokens=1000, cached_tokens=600, ended_s=1.0),
        worker(1, outcome="failed", error="TimeoutError", note="", began_s=1.0, ended_s=2.0),
        manager(prompt_tokens=500, began_s=2.0, ended_s=2.5),
    )
    assert tree.one("title").text == "Chain of agents: Why?"
    assert tree.one(css="question").text == "Why?"
    assert tree.one(css="answer").text == "Because."
    assert headline(tree) == [
        "Calls 3",
        "Prompt tokens 1,500 unknown for 1 call",
        "From the prefix cache 60% 600 tokens unknown for 2 calls",
        "Time 2.50 s",
        "Failures ✕ 1",
    ]


def test_what_models_do_not_tell_is_unknown_and_not_0():
    tree = shown(worker(0, ended_s=0.012), manager(cached_tokens=0))
    assert headline(tree)[1:3] == [
        "Prompt tokens unknown",
        "From the prefix cache unknown 0 tokens unknown for 1 call",
    ]
    assert facts(tree.all("li", "step")[0]) == ["unknown", "unknown", "unknown", "12 ms, from 0 ms"]
    [bar, _] = tree.all("a", "bar")
    assert bar.attributes["class"] == "bar unknown"
    assert bar.all(css="hit") == []


def test_a_sequential_chain_shows_who_hands_on_to_whom_past_a_failure():
    tree = shown(
        worker(0),
        worker(1, outcome="timed out", error="TimeoutError", note=""),
        worker(2),
        manager(),
    )
    assert tree.one("ol", "chain").text == (
        "1 worker 0 → 2 worker 1 ✕ timed out → 3 worker 2 → 4 manager"
    )
    steps = tree.all("li", "step")
    assert [rows(step) for step in steps] == [
        [],
        ["Error TimeoutError", "Given the note of call 1"],
        ["Given the note of call 1"],
        ["Given the note of call 3"],
    ]
    assert steps[2].one("a").attributes["href"] == f"#{steps[0].attributes['id']}"


def test_parallel_workers_stand_together_before_the_manager():
    tree = shown(
        worker(0), worker(1, outcome="empty", note=""), worker(2), manager(), mode="parallel"
    )
    assert tree.one("ol", "together").text == "1 worker 0 2 worker 1 ✕ empty 3 worker 2"
    assert tree.one("ol", "chain").text.endswith("→ 4 manager")
    assert [rows(step) for step in tree.all("li", "step")] == [[], [], [], ["Notes for it 2"]]


def test_the_timeline_has_a_bar_for_each_call_in_its_agents_lane():
    tree = shown(
        worker(0, agent=4, prompt_tokens=10, cached_tokens=5, ended_s=1.0),
        worker(1, agent=2, ended_s=2.0),
        worker(2, agent=4, prompt_tokens=10, cached_tokens=99, began_s=0.5, ended_s=2.0),
        worker(3, agent=4, outcome="failed", note="", began_s=1.0, ended_s=2.0),
        manager(prompt_tokens=8, cached_tokens=1, began_s=2.0, ended_s=4.0),
        mode="parallel",
    )
    lanes = tree.all("li", "lane")
    assert [lane.one(css="who").text for lane in lanes] == ["worker 4", "worker 2", "manager"]
    assert [lane.one(css="track").attributes["style"] for lane in lanes] == [
        "--rows: 2",
        "--rows: 1",
        "--rows: 1",
    ]
    assert [[bar.attributes["style"] for bar in lane.all("a", "bar")] for lane in lanes] == [
        [
            "--row: 0; left: 0.00%; width: 25.00%",
            "--row: 1; left: 12.50%; width: 37.50%",
            "--row: 0; left: 25.00%; width: 25.00%",
        ],
        ["--row: 0; left: 0.00%; width: 50.00%"],
        ["--row: 0; left: 50.00%; width: 50.00%"],
    ]
    bars = tree.all("a", "bar")
    assert [one.attributes["style"] for bar in bars for one in bar.all(css="hit")] == [
        "width: 50.0%",
        "width: 100.0%",
        "width: 12.5%",
    ]
    assert [bar.text for bar in bars] == ["", "", "✕", "", ""]
    assert bars[2].attributes["aria-label"] == (
        "call 4, worker 4: failed, 1.00 s to 2.00 s, cached unknown"
    )
    assert tree.one("ul", "ticks").text == "0 ms 1.00 s 2.00 s 3.00 s 4.00 s"


@pytest.mark.parametrize(
    ("duration_s", "ticks"),
    [
        (0.0, []),
        (0.00016, ["0 ms", "0.04 ms", "0.08 ms", "0.12 ms", "0.16 ms"]),
        (0.0396, ["0 ms", "9.9 ms", "20 ms", "30 ms", "40 ms"]),
        (0.004, ["0 ms", "1 ms", "2 ms", "3 ms", "4 ms"]),
        (1.4, ["0 ms", "350 ms", "700 ms", "1.05 s", "1.40 s"]),
        (50.0, ["0 ms", "12.50 s", "25.00 s", "37.50 s", "50.00 s"]),
        (1000.0, ["0 ms", "250 s", "500 s", "750 s", "1,000 s"]),
        (float("inf"), []),
        (float("nan"), []),
    ],
)
def test_the_axis_has_the_quarters_of_the_time(duration_s, ticks):
    tree = shown(manager(ended_s=duration_s))
    assert [one.text for axis in tree.all("ul", "ticks") for one in axis.all("li")] == ticks


def test_a_long_note_is_folded_and_a_huge_one_is_cut():
    long, huge = "long " * 100, "h" * 1_000_000
    steps = shown(worker(0, note="short"), worker(1, note=long), worker(2, note=huge))
    short_note, long_note, huge_note = (step.one(css="note") for step in steps.all("li", "step"))
    assert short_note.all("details") == []
    assert long_note.one("details").attributes == {}  # it is not open
    assert long_note.one("details").one(css="prose").children == [long]
    assert long_note.one("summary").one(css="size").text == "500 characters"
    assert huge_note.one("details").one(css="prose").children == ["h" * 20_000]
    assert huge_note.one("p").text == "980,000 more characters stand in the trace."


def test_many_lines_and_many_documents_are_folded():
    note = shown(worker(0, note="line\n" * 9)).one(css="note")
    assert note.one("summary").one(css="begin").text == " ".join(["line"] * 9) + "…"
    card = shown(worker(0, documents=tuple(range(100)))).one("li", "step")
    assert card.one("details").one("summary").text == "100 documents"
    assert [one.text for one in card.one("ul", "chips").all("li")] == list(map(str, range(100)))


def test_hostile_text_stays_text_wherever_it_stands():
    step = worker(
        0,
        documents=(HOSTILE, "x" * 5000),
        shown_before=(HOSTILE,),
        labels={HOSTILE: HOSTILE, f"other {HOSTILE}": f"other {HOSTILE}"},
        note=HOSTILE * 9,
        error=HOSTILE,
        remark=HOSTILE,
        replica=HOSTILE,
        outcome=HOSTILE,
    )
    html = Trace(question=HOSTILE, mode=HOSTILE, steps=(step, manager(note=HOSTILE))).to_html()
    tree = read(html)
    assert tree.all("script") == tree.all("img") == []
    names = {name for element in tree.all() for name in element.attributes}
    assert not {name for name in names if name.startswith("on")}
    assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202d\u202e\ud800-\udfff\ufffe]", html) is None
    assert tree.one(css="question").text == (
        '<script>alert(1)</script></details></main><img src="http://evil.example/x" '
        "onerror=alert(1)>\"' onmouseover='alert(2) {{ 7 * 7 }} &amp; ��[31m� � �gnp.exe �"
    )


def test_text_from_a_trace_cannot_turn_the_direction_of_what_stands_around_it():
    tree = shown(worker(0, documents=("שלום",), note="\u2067שלמה"), question="\u202bלמה?")
    assert tree.one(css="question").one(css="prose").attributes["dir"] == "auto"
    assert tree.one(css="note").one(css="prose").attributes["dir"] == "auto"
    assert tree.one("ul", "chips").one("bdi").text == "שלום"


def test_the_page_loads_and_runs_nothing_and_its_links_have_targets():
    html = Trace(question="Why?", mode="parallel", steps=(worker(0), manager())).to_html()
    tree = read(html)
    assert tree.all("script") == tree.all("link") == []
    for element in tree.all():
        assert not {"src", "srcset", "action", "data"} & element.attributes.keys()
        assert (element.attributes.get("href") or "#").startswith("#")
    assert re.search(r"https?:|url\(|@import|javascript:", html) is None
    assert "default-src 'none'" in html
    tree = shown(*(worker(position, agent=position % 3) for position in range(100)), manager())
    ids = [one.attributes["id"] for one in tree.all() if "id" in one.attributes]
    assert ids == [f"call-{number}" for number in range(1, 102)]
    assert {one.attributes["href"] for one in tree.all("a")} == {f"#{one}" for one in ids}


def test_rules_of_style_hold_for_the_page_alone():
    [style] = shown().one("style").children
    assert isinstance(style, str)
    rules = re.sub(r"@media[^{]*\{", "", style)
    selectors = [one for group in re.findall(r"([^{}]+)\{", rules) for one in group.split(",")]
    assert len(selectors) > 50
    assert [one for one in selectors if not one.strip().startswith(".coa")] == []


def test_traces_of_nothing_or_without_workers_are_pages():
    tree = shown(question="")
    assert tree.one("main").text == (
        "Chain of agents, sequential Answer There is no answer: the manager has not been called. "
        "No agent has been called."
    )
    tree = shown(manager(), mode="parallel")
    assert tree.one("ol", "chain").text == "1 manager"
    assert rows(tree.one("li", "step")) == ["Notes for it 0"]


def test_failed_managers_and_garbage_are_said_where_the_answer_would_be():
    tree = shown(worker(0), manager(note="", outcome="failed", error="RuntimeError"))
    assert tree.one(css="answer").text == ("✕ Manager: failed. There is no answer. See call 2")
    assert rows(tree.all("li", "step")[1]) == ["Error RuntimeError", "Given the note of call 1"]
    assert shown(manager(note="?!", outcome="garbage")).one(css="answer").text == (
        "✕ Manager: garbage. See call 1 ?!"
    )


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "0%"), (0.001, "<1%"), (0.5, "50%"), (0.999, ">99%"), (1.0, "100%")]
)
def test_only_all_is_100_percent_and_only_nothing_is_0(share, words):
    assert trace_page.percent(share) == words


def test_a_missing_jinja2_says_what_to_install(monkeypatch):
    vars(trace_page._PAGE).pop("_template", None)  # it is compiled once
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"Trace\.to_html .*\[agents\]'"):
        Trace(question="Why?", mode="parallel").to_html()
