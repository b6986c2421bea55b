"""The tool that counts folders, imports, names and journeys counts right."""

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


@pytest.fixture
def house(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import house

    return house


@pytest.fixture
def tree(house, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return house.Tree.of(tmp_path, ("pkg", "plugins"), (".", "plugins"))


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


def test_cycles_are_told_by_the_imports_that_they_need(house, tree):
    imports = tree.imports()
    assert house.cycles(house.graph_of(imports, "module")) == []
    assert house.cycles(house.graph_of(imports, "module", "TYPE_CHECKING")) == [
        ("pkg.mid", "pkg.top")
    ]
    assert house.cycles(house.graph_of(imports, "module", "function")) == [("other.top", "pkg.top")]


def test_the_longest_chain_takes_a_cycle_for_one_step(house, tree):
    imports = tree.imports()
    chain = house.longest_chain(house.graph_of(imports, "module"))
    assert chain == ["other.top", "pkg.top", "pkg.mid", "pkg.low"]
    chain = house.longest_chain(house.graph_of(imports, "module", "function"))
    assert chain == ["other.top + pkg.top", "pkg", "pkg.low"]  # of equals the first by name


def test_files_with_at_most_one_importer(house, tree):
    lonely, empty = house.with_one_importer_at_most(tree, tree.imports())
    assert lonely == ["pkg", "pkg.deep.low", "pkg.mid", "other.top"]
    assert empty == ["pkg.deep"]


def test_names_that_stand_more_than_once(house, tree):
    assert house.shared_class_names(tree) == {"Step": ["pkg.low", "pkg.mid"]}
    assert house.shared_module_names(tree) == (
        {"low": ["pkg.deep.low", "pkg.low"], "top": ["pkg.top", "other.top"]},
        {},
    )


def test_what_only_a_cache_is_left_of_is_no_entry(house, tree, tmp_path):
    assert house.entries(tmp_path / "pkg") == ["__init__.py", "deep", "low.py", "mid.py", "top.py"]
    folders = house.files_by_folder(tmp_path, ("pkg", "plugins"))
    assert folders == {"pkg": 4, "pkg/deep": 2, "plugins/other": 1}


def test_a_recorder_tells_standing_threads_apart(house, tmp_path):
    code = "def outer():\n    return [inner() for _ in range(2)]\n\ndef inner():\n    return 1\n"
    path = tmp_path / "product" / "module.py"
    functions: dict = {}
    exec(compile(code, str(path), "exec"), functions)
    begin, done = threading.Event(), threading.Event()

    def stand():
        begin.wait()
        functions["outer"]()
        done.set()

    recorder = house.Recorder(tmp_path, ("product",))
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
    assert (trip.size, trip.whole_size) == ((1, 1), (2, 1))


def test_a_journey_begins_at_the_public_call(house):
    trip = house.median_trip(house.plan_journey, times=1)
    assert next(iter(trip.stops)).function == "ReusePlanner.plan"
    assert trip.size == trip.whole_size
