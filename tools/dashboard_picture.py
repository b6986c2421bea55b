"""Draw the Grafana dashboard from metrics that this package exports: docs/grafana-dashboard.png.

    python tools/dashboard_picture.py [--prometheus FOLDER] [-o PNG]

Three hours are played in a minute: two planners send requests to emulated engines, and each minute
of that time the metrics are read as Prometheus would. From the second hour on another process,
which shares no log, uses the engine of one of them. A real Prometheus (the folder of its programs;
Debian has a package) then answers the queries of the dashboard's file, and Matplotlib draws the
panels where Grafana would put them: the numbers are real, the drawing is not Grafana's.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import matplotlib
from prometheus_client import CollectorRegistry

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache.telemetry import PlannerCollector
from ctxreuse.serving import EmulatedEngine
from ctxreuse.sharing import SQLiteLog

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "docs/grafana-dashboard.json"
MINUTES, REQUESTS_A_MINUTE, STEP_S = 180, 10, 60
START_S = 1_790_000_000
PORT = 19_090
CAPACITY = 14_000
LEGENDS = 4
VARIABLES = {"$__rate_interval": "10m", "$__range": "3h", "$planner": ".*", "$instance": ".*"}


class Service:
    """A planner, an engine that another may use, too, and questions about 200 documents."""

    def __init__(self, engine: EmulatedEngine, first: int, log: Path | None = None) -> None:
        self.planner = ReusePlanner(
            capacity_tokens=CAPACITY,
            tenant_class={"a": "paid", "b": "free"},
            shared_log=None if log is None else SQLiteLog(log),
        )
        self._history: list[dict[str, str]] = []
        self._chance = random.Random(first)
        self._http = httpx.Client(transport=engine.transport(httpx), base_url="http://engine")
        words = "river town bridge mill"
        self._documents = [
            ContextBlock(id=number, text=f"{number} {words} " * 34, tokens=170)
            for number in range(first, first + 200)
        ]

    def ask(self) -> None:
        """Plan and send one request, and note what its answer reports."""
        ranks = [int(self._chance.expovariate(1 / 30)) for _ in range(5)]
        blocks = [self._documents[min(rank, 199)] for rank in dict.fromkeys(ranks)]
        tenant = "a" if self._chance.random() < 0.7 else "b"
        in_chat = tenant == "a" and self._chance.random() < 0.1
        # the first turns of conversations, one after the other
        chat = {"history": self._history, "conversation_id": "chat"} if in_chat else {}
        request = ContextRequest(blocks, "And?" if in_chat else "Which?", tenant=tenant, **chat)
        plan = self.planner.plan(request)
        body = {"model": "emulated", "messages": plan.messages(), "cache_salt": tenant}
        usage = self._http.post("/v1/chat/completions", json=body).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.planner.report_usage(plan, usage["prompt_tokens"], cached)
        if in_chat:
            answer = {"role": "assistant", "content": "So."}
            self._history = [*plan.messages(), answer] if len(self._history) < 4 else []


def played(folder: Path) -> Iterator[str]:
    """Yield the samples of three hours, in Prometheus' text format with times."""
    engines = [EmulatedEngine(capacity_tokens=2 * CAPACITY) for _ in range(2)]
    search = Service(engines[0], 0, folder / "log.sqlite")
    support = Service(engines[1], 0)
    stranger = Service(engines[1], 200)
    registry = CollectorRegistry()
    PlannerCollector({"search": search.planner, "support": support.planner}).register(registry)
    series: dict[str, tuple[str, list[str]]] = {}
    for minute in range(MINUTES):
        for _ in range(REQUESTS_A_MINUTE):
            search.ask()
            support.ask()
            if minute >= MINUTES // 3:
                for _ in range(3):
                    stranger.ask()
        now = START_S + minute * STEP_S
        for family in registry.collect():
            lines = series.setdefault(family.name, (family.type, []))[1]
            for one in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in one.labels.items())
                lines.append(f"{one.name}{{{labels}}} {one.value} {now}\n")
        for name, count in (("queries", "prompt_tokens"), ("hits", "cached_tokens")):
            lines = series.setdefault(f"vllm:prefix_cache_{name}", ("counter", []))[1]
            for number, engine in enumerate(engines):
                labelled = f'vllm:prefix_cache_{name}_total{{engine="{number}"}}'
                lines.append(f"{labelled} {getattr(engine.usage, count)} {now}\n")
    for name, (kind, lines) in series.items():
        yield f"# TYPE {name} {kind}\n"
        yield from sorted(lines, key=lambda line: line.rsplit(" ", 2)[0])  # a series in one piece
    yield "# EOF\n"


@contextmanager
def prometheus(programs: Path, folder: Path) -> Iterator[httpx.Client]:
    """Yield a client of a Prometheus that has these three hours."""
    samples, config = folder / "samples.txt", folder / "config.yml"
    samples.write_text("".join(played(folder)))
    config.write_text("scrape_configs: []\n")
    tool = [str(programs / "promtool"), "tsdb", "create-blocks-from", "openmetrics"]
    subprocess.run([*tool, str(samples), str(folder / "data")], check=True, capture_output=True)
    server = subprocess.Popen(
        [
            str(programs / "prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--storage.tsdb.retention.time=100y",
            f"--web.listen-address=127.0.0.1:{PORT}",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}") as client:
            for _ in range(100):
                with suppress(httpx.ConnectError):
                    if client.get("/-/ready").status_code == 200:
                        break
                time.sleep(0.1)
            yield client
    finally:
        server.terminate()
        server.wait()


def answered(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """Return the series that a query of the dashboard has."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    times = {"start": START_S, "end": START_S + (MINUTES - 1) * STEP_S, "step": STEP_S}
    reply = client.get("/api/v1/query_range", params={"query": expression, **times}).json()
    if reply["status"] != "success":
        sys.exit(f"{expression}\n{reply}")
    return list(reply["data"]["result"])


def shown(value: float, unit: str) -> str:
    """Return a number as Grafana shows it."""
    if unit == "percentunit":
        return f"{value:.1%}"
    return f"{value * 1000:.2f} ms" if unit == "s" else f"{value:,.0f}"


def drawn(panel: dict[str, Any], axes: Any, client: httpx.Client) -> None:
    """Draw one panel."""
    axes.set_title(panel["title"], loc="left", fontsize=8, color="#d8d9da")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    scale = {"percentunit": 100, "s": 1000}.get(unit, 1)
    found = [(one, of) for of in panel["targets"] for one in answered(client, of["expr"])]
    if panel["type"] == "stat":
        axes.set_axis_off()
        text = shown(float(found[0][0]["values"][-1][1]), unit) if found else "no data"
        axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=15, color="#73bf69")
        return
    found.sort(key=lambda pair: -max(float(value) for _, value in pair[0]["values"]))
    for number, (one, target) in enumerate(found):
        label = target["legendFormat"]
        for name, value in one["metric"].items():
            label = label.replace("{{" + name + "}}", value)
        hours = [(float(at) - START_S) / 3600 for at, _ in one["values"]]
        values = [scale * float(value) for _, value in one["values"]]
        axes.plot(hours, values, lw=1, label=label if number < LEGENDS else "_")
    axes.tick_params(colors="#9fa7b3", labelsize=7)
    axes.grid(color="#2c3235", lw=0.5)
    axes.set_xlim(0, 3)
    axes.set_xticks(range(4), [f"{hour} h" for hour in range(4)])
    axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # a line at 0 is seen
    names = {"percentunit": "%", "s": "ms", "reqps": "requests/s"}
    axes.set_ylabel(names.get(unit, ""), color="#9fa7b3", fontsize=7)
    below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.17), "borderpad": 0}
    axes.legend(fontsize=7, frameon=False, labelcolor="#d8d9da", **below)


def main() -> None:
    """Draw all panels."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prometheus", type=Path, default=Path("/usr/bin"))
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs/grafana-dashboard.png")
    options = parser.parse_args()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in panels)
    figure = pyplot.figure(figsize=(9, rows * 0.34), facecolor="#111217")
    with (
        tempfile.TemporaryDirectory() as folder,
        prometheus(options.prometheus, Path(folder)) as client,
    ):
        for panel in panels:
            place = panel["gridPos"]
            if panel["type"] == "row":
                title, top = f"▸ {panel['title']}", 1 - (place["y"] + 0.5) / rows
                figure.text(0.01, top, title, va="center", fontsize=8, color="#d8d9da")
                continue
            below = 2.6 if panel["type"] == "timeseries" else 0.5
            axes = figure.add_axes(
                (
                    place["x"] / 24 + 0.055,
                    1 - (place["y"] + place["h"] - below) / rows,
                    place["w"] / 24 - 0.07,
                    (place["h"] - below - 1) / rows,
                ),
                facecolor="#181b1f",
            )
            drawn(panel, axes, client)
    figure.savefig(options.output, dpi=150, facecolor=figure.get_facecolor())


if __name__ == "__main__":
    main()
