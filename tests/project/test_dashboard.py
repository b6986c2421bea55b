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

SERIES = re.compile(r"((?:ctxreuse_|vllm:)\w+)(?:\{([^}]*)\})?")


def asked(query):
    """Yield the names of the series that a query asks for, each with the labels that it names."""
    by = {label for labels in re.findall(r"by \((.*?)\)", query) for label in labels.split(", ")}
    for name, matchers in SERIES.findall(query):
        yield name, by | {*re.findall(r'(\w+)[=!]~?"', matchers)}


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
    assert [*asked(query)]
    for name, labels in asked(query):
        assert name in exported
        assert labels <= exported[name], name


def test_variables_and_legends_name_what_is_exported(exported):
    variables = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    for variable in variables:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
        assert found[2] in exported[found[1]]
    assert [one["name"] for one in variables] == ["planner", "instance"]
    for panel in PANELS:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert all(shown <= exported[name] for name, _ in asked(target["expr"]))


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
