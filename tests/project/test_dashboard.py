"""The Grafana dashboard: each query is one, and asks for what is exported."""

import json
import re
import shutil
import subprocess
from itertools import combinations

import pytest
from doc_pages import ROOT
from pool_helpers import Network, asking, pool_on
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache.telemetry import PlannerCollector
from ctxreuse.serving import EmulatedEngine

DASHBOARD = json.loads((ROOT / "docs/grafana-dashboard.json").read_text())
ROWS = [one for one in DASHBOARD["panels"] if one["type"] == "row"]
SHOWN = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
PANELS = [*SHOWN, *(panel for row in ROWS for panel in row["panels"])]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = {"$__rate_interval": "5m", "$__range": "6h", "$planner": ".*", "$instance": ".*"}

TOKEN = re.compile(
    r"\s*(?:(?P<name>[a-zA-Z_:][\w:]*)|(?P<number>\d+(?:\.\d+)?)|(?P<text>\"[^\"\\]*\")"
    r"|(?P<range>\[\d+[smhd]\])|(?P<sign>=~|!=|!~|[-+*/(){},=]))"
)
FUNCTIONS = {"deriv", "rate", "increase", "histogram_quantile"}
AGGREGATIONS = {"sum", "max"}


class Query:
    """Reads the part of PromQL that the dashboard uses; anything else fails.

    Attributes:
        asked: The names of the series that it asks for, each with the labels that it names.
    """

    def __init__(self, text):
        for name, value in VARIABLES.items():
            text = text.replace(name, value)
        self.asked = []
        self._tokens, end = [], 0
        while end < len(text):
            found = TOKEN.match(text, end)
            assert found, f"{text!r} at {end}"
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            end = found.end()
        self._expression()
        assert not self._tokens, self._tokens

    def _next(self, *wanted):
        kind, text = self._tokens.pop(0)
        assert not wanted or text in wanted or kind in wanted, (text, wanted)
        return text

    def _is_next(self, *wanted):
        return bool(self._tokens) and (self._tokens[0][1] in wanted or self._tokens[0][0] in wanted)

    def _expression(self):
        self._operand()
        while self._is_next("+", "-", "*", "/"):
            self._next()
            self._operand()

    def _operand(self):
        if self._is_next("number"):
            self._next()
        elif self._is_next("("):
            self._next()
            self._expression()
            self._next(")")
        else:
            self._named(self._next("name"))

    def _named(self, name):
        before = len(self.asked)
        by = []
        if name in AGGREGATIONS and self._is_next("by"):
            self._next()
            by = self._labels()
        if name in AGGREGATIONS | FUNCTIONS:
            self._next("(")
            self._expression()
            while self._is_next(","):
                self._next()
                self._expression()
            self._next(")")
            for _, labels in self.asked[before:]:
                labels.update(by)
            return
        labels = set(self._matchers()) if self._is_next("{") else set()
        self.asked.append((name, labels))
        if self._is_next("range"):
            self._next()

    def _labels(self):
        self._next("(")
        names = [self._next("name")]
        while self._is_next(","):
            self._next()
            names.append(self._next("name"))
        self._next(")")
        return names

    def _matchers(self):
        self._next("{")
        while not self._is_next("}"):
            yield self._next("name")
            self._next("=", "=~", "!=", "!~")
            self._next("text")
            if self._is_next(","):
                self._next()
        self._next("}")


@pytest.fixture(scope="module")
def exported():
    """The labels of each series that this package and an engine export, by the series' name."""
    import asyncio

    async def page():
        engine = EmulatedEngine()
        planner = ReusePlanner(tenant_class={"": "paid"})
        planner.report_usage(planner.plan(ContextRequest(["a text"], "Which?")), 10, 0)
        async with pool_on(Network(a=engine)) as pool:
            await pool.complete(asking("ab"))
            registry = CollectorRegistry()
            PlannerCollector(planner, pool).register(registry)
            return generate_latest(registry).decode() + engine.metrics()

    found = {}
    for family in text_string_to_metric_families(asyncio.run(page())):
        for sample in family.samples:
            found.setdefault(sample.name, {"instance"}).update(sample.labels)  # Prometheus adds it
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_is_exported(query, exported):
    parsed = Query(query)
    assert parsed.asked
    for name, labels in parsed.asked:
        assert name in exported
        assert labels <= exported[name], name


def test_variables_and_legends_name_what_is_exported(exported):
    asked = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    for variable in asked:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
        assert found[2] in exported[found[1]]
    assert [one["name"] for one in asked] == ["planner", "instance"]
    for panel in PANELS:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert all(shown <= exported[name] for name, _ in Query(target["expr"]).asked)


@pytest.mark.parametrize("wrong", ["sum(rate(a[5m])", "rate(a[5])", "a{b}", "sum(a) by", "a b", ""])
def test_what_is_no_query_is_noticed(wrong):
    with pytest.raises((AssertionError, IndexError)):
        assert Query(wrong).asked


def test_panels_stand_beside_each_other():
    assert len({panel["id"] for panel in [*PANELS, *ROWS]}) == len(PANELS) + len(ROWS)
    cells = {
        panel["title"]: {
            (x, y)
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        }
        for panel in DASHBOARD["panels"]
    }
    assert all(x < 24 for place in cells.values() for x, _ in place)
    assert not any(cells[one] & cells[other] for one, other in combinations(cells, 2))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_takes_each_query(tmp_path):
    rules = []
    for number, query in enumerate(QUERIES):
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        rules.append({"record": f"query_{number}", "expr": query})
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
