"""Results files with anything in any place: one error that names it, or a page."""

import copy
import json
from functools import reduce
from operator import getitem

import pytest
from matplotlib.figure import Figure
from test_report import results

from ctxreuse.errors import InputFileError
from ctxreuse.measure.report import page, report_page
from ctxreuse.measure.report.report_page import charts
from ctxreuse.measure.results.tables import estimate_output, results_json, tables
from public_data.stored_results import read_results, write_results

VALUES = {
    "null": "null",
    "true": "true",
    "minus one": "-1",
    "minus nothing": "-0.0",
    "one and a half": "1.5",
    "not a number": "NaN",
    "infinity": "Infinity",
    "more than a float": "1e400",
    "400 digits": "9" * 400,
    "a text": '"\\ud800$\\\\frac{ \\u202e<script>"',
    "an empty list": "[]",
    "an empty object": "{}",
    "a list of lists": "[[], [[]]]",
    "a list of numbers": "[1, 2, 3]",
    "nested 400 deep": "[" * 400 + "]" * 400,
}


def places(value, path=()):
    """Yield the path of every part of a JSON value; of a list that of its first entry."""
    if path:
        yield path
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*path, name))
    elif isinstance(value, list):
        for position in range(min(1, len(value))):
            yield from places(value[position], (*path, position))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The JSON of a results file with few runs: one with each cache, and one of each other part."""
    path = tmp_path_factory.mktemp("results") / "results.json"
    write_results(results(), path)
    fields = json.loads(path.read_text())
    by_kind = {(run["part"], run["capacity_tokens"]): run for run in reversed(fields["runs"])}
    runs = list(reversed(by_kind.values()))
    of_engine = {
        "request_ids": [str(number) for number in range(len(runs[0]["prompt_tokens"]))],
        "first_token_s": [0.5] * len(runs[0]["prompt_tokens"]),
        "answers": ["yes"] * len(runs[0]["prompt_tokens"]),
    }
    runs.append({**runs[0], **of_engine})
    return fields | {"runs": [runs[-1], *runs], "settings": [["k", "5"]], "notes": ["a note"]}


def changed(stored, path, value):
    """Return the file's text with one part replaced by other JSON."""
    fields = copy.deepcopy(stored)
    reduce(getitem, path[:-1], fields)[path[-1]] = "@"
    return json.dumps(fields).replace('"@"', value)


def read(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    return read_results(path)


def refused_or_shown(folder, stored, value, fields=None):
    """Put a value into each place, or those of some fields; return how many, and the refused."""
    files = refused = 0
    for path in places(stored):
        if fields is not None and path[0] not in fields:
            continue
        files += 1
        try:
            found = read(folder, changed(stored, path, value))
        except InputFileError as error:
            refused += 1
            message = str(error)
            assert message.startswith(f"{folder / 'results.json'}: ")
            assert "\n" not in message
            assert len(message) < 300 + len(str(folder))
            assert path[0] == "format" or str(path[0]) in message
        else:
            assert page(found).startswith("<!DOCTYPE html>")
            assert [*estimate_output(found), *tables(found), results_json(found)]
            for chart in charts(found):
                chart.draw(Figure().add_subplot())
    return files, refused


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_any_value_in_any_place_is_one_line_or_a_page(tmp_path, monkeypatch, stored, value):
    monkeypatch.setattr(report_page, "charts", lambda _: [])  # rendering them takes half a second
    files, refused = refused_or_shown(tmp_path, stored, value)
    assert files > 60
    assert refused > files / 2


@pytest.mark.parametrize("name", [VALUES["a text"], json.dumps("_" + "n" * 100_000)])
def test_names_of_any_kind_are_drawn(tmp_path, stored, name):
    text = changed(stored, ("runs", 0, "policy"), name)
    text = changed(json.loads(text), ("tree", "children", 0, "name"), name)
    found = read(tmp_path, text)
    assert page(found).startswith("<!DOCTYPE html>")


def test_any_missing_part_is_named_or_has_a_default(tmp_path, stored):
    kept, others = [], {}
    for path in places(stored):
        fields = copy.deepcopy(stored)
        inside = reduce(getitem, path[:-1], fields)
        if isinstance(inside, list):
            continue
        del inside[path[-1]]
        try:
            read(tmp_path, json.dumps(fields))
        except InputFileError as error:
            if f"{path[-1]} is missing; write the results again" not in str(error):
                others[path[-1]] = str(error).partition(": ")[2]
        else:
            kept.append(path[-1])
    assert list(dict.fromkeys(kept)) == [
        *("part", "k", "sessions", "answers", "failures", "word_tokens"),
        *("children", "label", "light_tokens", "bounds", "settings", "notes", "cache_tokens"),
        *("prefill_tokens_per_s", "prices", "command", "date", "python", "causes"),
        *("causes_first", "prompts", "hides_texts"),
    ]
    assert list(others) == ["format", "request_ids", "first_token_s"]


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("runs", 0, "prompt_tokens", 1), '"7"', "runs[0]: prompt_tokens[1] is '7' (str); it must"),
        (("runs", 0, "planning_ms"), "NaN", "runs[0]: planning_ms is nan (float); it must be a fi"),
        (("runs", 0, "cached_tokens", 0), "9" * 30, "runs[0]: cached_tokens[0] is 999"),
        (("runs", 0, "cached_tokens"), "[]", "runs[0]: cached_tokens has 0 entries; it must have"),
        (("runs", 1, "mode"), '"often"', "runs[1]: mode is 'often' (str); it must be one of onlin"),
        (("trace", "turns"), "-1", "trace: turns is -1 (int); it must be an integer from 0"),
        (("tree", "children"), '{"a": 1}', "tree: children is {'a': 1} (dict); it must be a list"),
        (("level"), '"page"', "level is 'page' (str); it must be one of blocks, tokens, engine"),
    ],
)
def test_an_error_names_file_place_value_and_what_is_right(tmp_path, stored, path, value, problem):
    path = (path,) if isinstance(path, str) else path
    with pytest.raises(InputFileError) as caught:
        read(tmp_path, changed(stored, path, value))
    assert str(caught.value).startswith(f"{tmp_path / 'results.json'}: {problem}")


@pytest.mark.parametrize("depth", [7, 100, 500, 2_000])
def test_a_tree_deeper_than_any_of_ours_is_refused(tmp_path, stored, depth):
    node = '{"name": "n", "requests": 1, "sent_tokens": 1, "children": ['
    deep = node * depth + "]}" * depth
    with pytest.raises(InputFileError, match=r"none 5 blocks deep|no JSON"):
        read(tmp_path, changed(stored, ("tree",), deep))
