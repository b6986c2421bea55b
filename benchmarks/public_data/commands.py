"""The commands of `benchmarks/public_data`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

import typer

from ctxreuse.cli import terminal
from ctxreuse.cli.measure_commands import stamped
from ctxreuse.cli.terminal import api_key, progress, put, say, show
from ctxreuse.context.files import check_writable, file_errors, make_folder, write_text
from ctxreuse.errors import CtxreuseError
from ctxreuse.measure.options import option
from ctxreuse.measure.report import page
from public_data.bench_output import bench_json, bench_output, more_tables, write_csv
from public_data.benchmark import BenchConfig, run
from public_data.quality.quality_results import quality_output
from public_data.quality.quality_run import QualityConfig, run_quality
from public_data.quality.question_sets import sets_to_ask

app = typer.Typer(
    cls=terminal.CommandGroup,
    help="""Measure ctxreuse on public data sets, beside others.

    `bench jsonl --data FOLDER --k 5` compares ways to order what is retrieved: as retrieved,
    LangChain's and LlamaIndex's own LongContextReorder, the papers' algorithm, CacheWeaver,
    ctxreuse, and with `--contextpilot-python PYTHON` the published contextpilot package. It
    simulates the cache, or with `--base-url URL` asks an engine.

    `quality --base-url URL` asks an engine the same questions with the blocks in several orders,
    and says how much its answers change.

    Data sets are read as their authors publish them, and are not downloaded. `make bench-vllm` and
    `make bench-quality` run both with a small model.
    """,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@dataclass(frozen=True, kw_only=True)
class Bench(terminal.PrintsJson, BenchConfig):
    """Compare ways to order retrieved blocks on a data set.

    Over cache sizes (part policies), numbers of blocks (k) and of conversations at a time
    (sessions), and with one idea left out at a time (ablations).

    `bench multihop-rag --data MultiHop-RAG/dataset --k 10 --html report.html`
    """

    output: Path = option(
        "Folder for results.json and results.csv.", Path("bench-output"), "--output", "-o"
    )
    html: str | None = option("Write a report, one HTML file, too.", None)

    def run(self) -> None:
        """Measure, show and write."""
        check_writable(self.html)
        _make_folder(self.output)
        measured = run(replace(self, api_key=api_key()), progress, say)
        measured = measured._replace(results=stamped(measured.results))
        results, is_scored = measured.results, self.answer_tokens != 1
        told = json.dumps(bench_json(results))
        write_text(self.output / "results.json", told + "\n")
        write_csv(measured, self.output / "results.csv")
        if self.as_json:
            put(told)
        else:
            show(bench_output(measured, is_scored=is_scored))
        say(f"wrote {self.output / 'results.json'} and {self.output / 'results.csv'}")
        if self.html is not None:
            more = list(more_tables(measured, is_scored=is_scored))
            write_text(self.html, page(results, more))
            say(f"wrote {self.html}")


@dataclass(frozen=True, kw_only=True)
class Quality(QualityConfig):
    """Ask an engine the same questions with the blocks shown in several ways ("arms"), greedily.

    It says how much F1, exact matches and answers that hold the right one change against the
    retriever's order, with paired 95% intervals. It keeps every answer: stopped by Ctrl-C or
    --hours, it shows what there is, and goes on there the next time.

    `quality --base-url http://127.0.0.1:8000/v1 --hours 2` asks the question sets of the folder of
    public data that --data or CTXREUSE_DATA names; without one, about the Python reference.

    `quality jsonl --data FOLDER --k 5 --base-url URL`
    """

    output: Path = option("Folder for quality.json.", Path("bench-output"), "--output", "-o")

    def run(self) -> None:
        """Ask, show and write."""
        data = self.data
        if data is None and self.dataset is None and os.environ.get("CTXREUSE_DATA"):
            data = Path(os.environ["CTXREUSE_DATA"])
        sets = sets_to_ask(replace(self, data=data), self.question_set, progress)
        _make_folder(self.output)
        say(f"asking {', '.join(one.name for one in sets)}")
        answers = self.answers or self.output / "answers.jsonl"
        results = run_quality(replace(self, api_key=api_key(), answers=answers), sets, say)
        show(quality_output(results))
        results.write(self.output / "quality.json")
        say(f"wrote {self.output / 'quality.json'}")
        if results.exit_code:
            raise typer.Exit(results.exit_code)


def _make_folder(path: Path) -> None:
    """Make a folder, and check before a long measurement that files can be written there."""
    make_folder(path)
    with file_errors(path, "written"), TemporaryFile(dir=path):
        pass


for _name, _command in {"bench": Bench, "quality": Quality}.items():
    app.command(_name, cls=terminal.Command)(terminal.command_of(_command))


def main() -> None:
    """Run a command; errors that the user can mend are one line, exit code 2."""
    try:
        app()
    except CtxreuseError as error:
        print(f"public_data: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"public_data: {error}; pip install -e '.[all]' --group bench", file=sys.stderr)
    sys.exit(2)
