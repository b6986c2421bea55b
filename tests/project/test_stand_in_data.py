"""Benchmarks run without the public data, on data that are made for them."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import shared
from stand_in_data import write_stand_in_data

NAMES = ("xquad_k5", "xquad_k15", "mtrag_k5", "mtrag_k10", "locomo_k20", "locomo_k100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_stand_in_data(tmp_path_factory.mktemp("data"))


def test_each_file_is_made_alike_each_time(folder, tmp_path):
    again = write_stand_in_data(tmp_path)
    files = sorted(one.relative_to(folder) for one in folder.rglob("*.jsonl"))
    assert len(files) == 3 * 4 + 1
    for file in files:
        assert (again / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_traces_have_the_shape_of_the_public_ones(folder, name):
    trace, corpus = shared.read_named_trace(folder, name)
    data, depth = name.split("_k")
    assert len(trace) > 500
    assert max(len(request.blocks) for request in trace) == int(depth)
    assert sum(len(request.blocks) for request in trace) > 0.5 * int(depth) * len(trace)
    used = {block.id for request in trace for block in request.blocks}
    assert used <= corpus.keys()
    assert any(request.turn for request in trace) == (data == "mtrag")
    if data == "locomo":  # nobody gets another user's memories
        for request in trace:
            assert len({str(block.id).split("/")[0] for block in request.blocks}) == 1
    assert len(shared.right_answers(folder, data, "id")) > 400


def test_turns_of_a_conversation_come_in_order_between_those_of_others(folder):
    trace, _ = shared.read_named_trace(folder, "mtrag_k5")
    turns = {}
    for request in trace:
        assert turns.get(request.conversation_id, -1) == request.turn - 1
        turns[request.conversation_id] = request.turn
    changes = sum(one.conversation_id != other.conversation_id for one, other in pairwise(trace))
    assert changes > len(trace) / 2


def test_who_has_no_public_data_is_told_what_stands_for_them(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CTXREUSE_DATA", raising=False)
    monkeypatch.setattr(shared, "STAND_IN", tmp_path)
    assert shared.data_folder("xquad", "2wiki") == tmp_path
    assert "CTXREUSE_DATA is not set" in capsys.readouterr().out
    monkeypatch.setenv("CTXREUSE_DATA", str(folder))
    assert shared.data_folder("xquad") == folder
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match=f"there is no peer.json in {folder}"):
        shared.data_folder("peer.json")
