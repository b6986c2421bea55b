"""The command that measures what the division of a GPU's memory needs."""

import json

import faiss
import numpy as np
import pytest
from ivf_helpers import build_index, some_vectors
from served_engines import URL

import memory_tables
from ctxreuse.errors import EngineError

TIMES = ["--seconds", "0.3", "--arriving", "20", "40"]


def test_both_tables_are_measured_and_the_split_is_printed(served, tmp_path, capsys):
    served()
    tables = str(tmp_path / "tables.json")
    faiss.write_index(build_index("L2"), str(tmp_path / "index"))
    np.save(tmp_path / "queries.npy", some_vectors()[:20])
    (tmp_path / "prompts.txt").write_text("Who?\nWhere?\n")
    searched = ["--index", str(tmp_path / "index"), "--queries", str(tmp_path / "queries.npy")]
    memory_tables.main(["retrieval", tables, *searched, *TIMES, "--hot-gb", "0", "0.00001"])
    with pytest.raises(SystemExit):
        memory_tables.main(["split", tables, "--gb", "3"])
    assert "has no table of generation: measure it first" in capsys.readouterr().err
    asked = ["--base-url", URL, "--prompts", str(tmp_path / "prompts.txt"), *TIMES]
    for size in ("2", "1"):  # a row is added to those that are there
        memory_tables.main(["generation", tables, *asked, "--kv-gb", size])
    written = json.loads((tmp_path / "tables.json").read_text())
    assert written["retrieval"]["memory_bytes"] == [0, 10_000]
    assert written["generation"]["memory_bytes"] == [10**9, 2 * 10**9]
    figures = np.array([written[name]["completed"] for name in ("retrieval", "generation")])
    assert figures.shape == (2, 2, 2)
    assert (figures > 0).all()
    with pytest.raises(SystemExit):
        memory_tables.main(["generation", tables, *asked[:-1], "9", "--kv-gb", "3"])
    assert "is for --arriving 20.0 40.0" in capsys.readouterr().err
    memory_tables.main(["split", tables, "--gb", "3", "--runs", "10"])
    assert "MemorySplit(kv_bytes=" in capsys.readouterr().out


def test_an_engine_that_fails_is_no_row_of_a_table(served, tmp_path):
    served(fail=[400] * 100)
    (tmp_path / "prompts.txt").write_text("Who?\n")
    asked = ["--base-url", URL, "--prompts", str(tmp_path / "prompts.txt"), *TIMES]
    with pytest.raises(EngineError):
        memory_tables.main(["generation", str(tmp_path / "tables.json"), *asked, "--kv-gb", "1"])
    assert not (tmp_path / "tables.json").exists()
