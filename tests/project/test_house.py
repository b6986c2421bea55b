"""The tool that counts sizes, folders, imports, names and journeys counts right."""

import ast
import sys
import threading
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="no tools here")

FILES = {
    "pkg/__init__.py": "from pkg.low import Thing\n",
    "pkg/low.py": "class Thing: ...\nclass _Step: ...\n",
    "pkg/mid.py": (
        "from typing import TYPE_CHECKING\nimport pkg.low\n"
        "if TYPE_CHECKING:\n    from pkg.top import run\n"
        "class Step: ...\n"
    ),
    "pkg/top.py": "from pkg import mid\n\ndef run():\n    from other.top import page\n",
    "pkg/deep/__init__.py": "",
    "pkg/deep/low.py": "CLASSES = 'pkg.low.Thing', 'pkg.top'\n",
    "pkg/stale/__pycache__/gone.pyc": "",
    "plugins/other/top.py": "from pkg import Thing\nimport pkg.top\n\ndef page(): ...\n",
}


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))


@pytest.fixture
def house():
    import house

    return house


@pytest.fixture
def layout():
    from house_measures import structure

    return structure


@pytest.fixture
def tree(layout, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return layout.Tree.of(tmp_path, ("pkg", "plugins"), (".", "plugins"))


def test_an_import_is_of_the_file_and_of_the_module_that_defines_the_name(tree):
    assert sorted(tree.imports()) == [
        ("other.top", "pkg", "module"),
        ("other.top", "pkg.low", "module"),
        ("other.top", "pkg.top", "module"),
        ("pkg", "pkg.low", "module"),
        ("pkg.deep.low", "pkg.top", "name"),
        ("pkg.mid", "pkg.low", "module"),
        ("pkg.mid", "pkg.top", "TYPE_CHECKING"),
        ("pkg.top", "other.top", "function"),
        ("pkg.top", "pkg.mid", "module"),
    ]


def test_cycles_are_told_by_the_imports_that_they_need(layout, tree):
    imports = tree.imports()
    assert layout.cycles(layout.graph_of(imports, "module")) == []
    assert layout.cycles(layout.graph_of(imports, "module", "TYPE_CHECKING")) == [
        ("pkg.mid", "pkg.top")
    ]
    assert layout.cycles(layout.graph_of(imports, "module", "function")) == [
        ("other.top", "pkg.top")
    ]


def test_names_that_stand_more_than_once(layout, tree):
    assert layout.shared_class_names(tree) == {"Step": ["pkg.low", "pkg.mid"]}
    assert layout.shared_module_names(tree) == {
        "low": ["pkg.deep.low", "pkg.low"],
        "top": ["pkg.top", "other.top"],
    }


def test_strings_and_imports_of_product_names_are_found(layout, tree, tmp_path):
    assert layout.files_with(tree, "pkg.top") == ["pkg.deep.low"]
    path = tmp_path / "plugins/other/top.py"
    assert layout.product_names(path, {"pkg"}) == ["Thing"]
    path.write_text("NAME = 'paper'\n__all__ = ['NAME']\n")
    (tmp_path / "pkg/__init__.py").write_text("__all__ = ['Thing', 'run']\n")
    tree = layout.Tree.of(tmp_path, ("pkg", "plugins"), (".", "plugins"))
    assert layout.files_with(tree, "paper") == ["other.top"]
    assert layout.exported_names(tree) == ["pkg.Thing", "pkg.run"]


def test_what_only_a_cache_is_left_of_is_no_entry(layout, tree, tmp_path):
    assert layout.entries(tmp_path / "pkg") == ["__init__.py", "deep", "low.py", "mid.py", "top.py"]
    folders = layout.files_by_folder(tmp_path, ("pkg", "plugins"))
    assert folders == {"pkg": 4, "pkg/deep": 2, "plugins/other": 1}


def test_code_is_what_is_neither_docstring_import_comment_nor_blank(tmp_path):
    from house_measures import sizes

    path = tmp_path / "module.py"
    path.write_text(
        '"""A module.\n\nMore."""\n\nimport os\n\nSIZE = 1  # words\n"""What it is."""\n'
        'def f(\n    x,\n):\n    """Return."""\n    return {x}\n'
    )
    assert sizes.code_lines(path) == 5
    assert sizes.code_tokens(path) == 14
    assert sizes.lines([path]) == 13
    assert sizes.function_lengths([ast.parse(path.read_text())]) == [5]


def test_a_number_above_its_ceiling_is_named_with_the_amount(house):
    ceilings = house.read(
        '{"lines": {"ceiling": 100, "aim": 90}, "time": {"ceiling": 2, "aim": 1, "slack": 0.15},'
        ' "old": {"ceiling": 1, "aim": 1}}'
    )
    numbers = {name: house.Number(value) for name, value in (("lines", 150), ("time", 2.2))}
    numbers["new"] = house.Number(None)
    assert list(house.faults(numbers, ceilings)) == [
        "new: not in house.json",
        "old: not measured any more",
        "lines: 150 is 50 above its ceiling of 100",
    ]


def test_ceilings_are_lowered_by_more_than_noise_and_never_raised(house):
    ceilings = house.read(
        '{"lines": {"ceiling": 100, "aim": 90, "why": "a door"}, "words": {"ceiling": 7, "aim": 5},'
        ' "time": {"ceiling": 2, "aim": 1, "slack": 0.15}}'
    )
    numbers = {"lines": 98, "words": 8, "time": 1.9}
    assert house.lowered({k: house.Number(v) for k, v in numbers.items()}, ceilings) == {
        "lines": {"ceiling": 98, "aim": 90, "why": "a door"},
        "words": {"ceiling": 7, "aim": 5},
        "time": {"ceiling": 2, "aim": 1, "slack": 0.15},
    }


def test_a_ceiling_that_rises_needs_another_why(house):
    one, other, silent = (
        {"lines": house.Ceiling(high, 90, why=why)}
        for high, why in ((100, ""), (120, "a door"), (130, "a door"))
    )
    assert list(house.silent_raises([one, other, one])) == []
    assert list(house.silent_raises([one, other, silent])) == [
        "lines: its ceiling rose from 120 to 130 without another why"
    ]


def test_a_recorder_tells_standing_threads_apart(tmp_path):
    from house_measures.recorder import Recorder

    code = "def outer():\n    return [inner() for _ in range(2)]\n\ndef inner():\n    return 1\n"
    path = tmp_path / "product" / "module.py"
    functions: dict = {}
    exec(compile(code, str(path), "exec"), functions)
    begin, done = threading.Event(), threading.Event()

    def stand():
        begin.wait()
        functions["outer"]()
        done.set()

    recorder = Recorder(tmp_path, ("product",))
    profiler = sys.getprofile()
    try:
        with recorder.installed():
            standing = threading.Thread(target=stand)
            standing.start()
            with recorder.recording():
                functions["inner"]()
                begin.set()
                done.wait()
            standing.join()
            functions["outer"]()
    finally:
        sys.setprofile(profiler)
    trip = recorder.trip()
    assert list(map(str, trip.stops)) == ["product/module.py:inner", "product/module.py:outer"]
    assert (trip.size, trip.whole_size) == ((1, 1, 1), (2, 1, 4))


def test_a_journey_begins_at_the_public_call(house):
    from house_measures import journeys

    trip = journeys.lower_trip(journeys.plan_journey, house.ROOT, house.PRODUCT, times=1)
    assert next(iter(trip.stops)).function == "ReusePlanner.plan"
    assert trip.size == trip.whole_size
