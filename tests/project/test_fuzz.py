"""`make fuzz` feeds hostile inputs to everything that reads what strangers write."""

import gc
import subprocess
import sys
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from ctxreuse.errors import CtxreuseError

ROOT = Path(__file__).resolve().parents[2]
FUZZ = ROOT / "tools" / "fuzz.py"


def fuzz(*arguments, program=FUZZ):
    command = [sys.executable, str(program), "--seed", "0", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.fixture
def mutation(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from fuzz_targets import mutation

    return mutation


def test_an_input_follows_from_seed_target_and_number_alone(mutation):
    def made(seed):
        source = Random(seed)
        value = mutation.mutated({"a": [1, {"b": "text"}]}, source)
        return mutation.as_json(value, source), mutation.text(source)

    assert [made(f"0:x:{n}") for n in range(50)] == [made(f"0:x:{n}") for n in range(50)]
    assert len({made(f"0:x:{n}") for n in range(50)}) > 25


@pytest.fixture
def public(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from fuzz_targets import public, public_names

    return SimpleNamespace(called=public.called(), names=public_names, target=public)


def test_every_public_name_is_called_with_anything_or_has_a_reason(public):
    documented = public.names.documented()
    for package in public.names.PACKAGES:
        module = import_module(package)
        assert documented.keys() >= {f"{package}.{name}" for name in module.__all__}
    takers = {name for name, _, _ in public.names.calls()}
    assert takers == public.called.keys() | {name for name in takers if public.names.reason(name)}
    for wildcard, reason in public.names.REASONS.items():
        assert len(reason) > 10
        assert any(fnmatchcase(name, wildcard) for name in takers), f"{wildcard} is out of date"
    assert public.called.keys() >= {
        "ctxreuse.ReusePlanner",
        "ctxreuse.ReusePlanner.trim",
        "ctxreuse.serving.EnginePool.complete",
        "chain_of_agents.ChainOfAgents.end_conversation",
        "mem0_ctxreuse.ReuseMemory.context",
    }


def test_every_method_that_is_called_has_an_object_to_be_called_on(public):
    for owner, _ in public.called.values():
        assert owner is None or owner in public.target.OBJECTS, owner


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what is never awaited or closed is not the matter here
def test_genuine_arguments_are_accepted(public, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    accepted = 0
    for name, (owner, function) in public.called.items():
        arguments = public.target.genuine_arguments(name, owner, function)
        if arguments is not None:
            public.target.call((name, arguments))
            accepted += 1
    assert accepted > 200
    gc.collect()  # now, where nobody minds


WRONG = (None, -1, 10**400, float("nan"), "\ud800", b"x", object(), [[]], {"a": 1}, {1: 2}, print)
CORE = ("ReusePlanner", "Templates", "Conversation", "Context", "request_context", "cache.Block")


def is_called_with_anything(name):
    """Return whether it is of the core, or few programs would see that it fails from within."""
    parts = ("ChainPrompts", "LLM.stream", "TfidfEmbedder", "HotTier.note", "context_distance")
    parts += (*CORE, "PrefixCache", "workflow.Graph", "workflow.State", "measure.re")
    return any(part in name for part in parts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_one_wrong_argument_between_good_ones_is_an_answer_or_an_error_that_names_it(public):
    refusals = []
    for name, (owner, function) in public.called.items():
        good = public.target.genuine_arguments(name, owner, function)
        if good is None or not is_called_with_anything(name):
            continue
        for parameter in good:
            for wrong in WRONG:
                try:
                    public.target.call((name, good | {parameter: wrong}))
                except CtxreuseError as error:
                    refusals.append(str(error))
    assert len(refusals) > 200
    assert all(10 < len(words) < 500 for words in refusals)
    gc.collect()  # as above
    gc.collect()


@pytest.fixture
def wrapped(monkeypatch):
    for folder in ("tools", "tests/support"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    from fuzz_targets import wrapped

    return wrapped


def test_a_comparison_allows_what_is_documented_and_nothing_else(wrapped):
    context, moved, a = map(wrapped.labelled, ("ab", "ba", "a"))
    ranked = f"Read documents {wrapped.label('a')}, {wrapped.label('b')} first."
    comparison = wrapped.Comparison([context])

    def is_allowed(given, got):
        try:
            comparison.check(given, got)
        except AssertionError:
            return False
        return True

    asked = {"content": f"By [BCDF]:{context}\nWhich?"}
    assert is_allowed(asked, dict(asked))
    assert is_allowed(asked, {"content": f"By [BCDF]:{moved}\n\n{ranked}\nWhich?"})
    assert is_allowed(asked, {**asked, "ctxreuse": {"labels": {}}})
    for got in (
        f"By [GHJK]:{context}\nWhich?",
        f"By [BCDF]:{a}\nWhich?",
        f"By [BCDF]:{context}\n\n{a}\nWhich?",
        f"By [BCDF]:{context[:-1]}\nWhich?",
        f"By [BCDF]:{context}\n\n{ranked} nothing.\nWhich?",
        context,
    ):
        assert not is_allowed(asked, {"content": got}), got
    for got in ([], [asked], {"content": None}, {}, {**asked, "more": 1}):
        assert not is_allowed(asked, got)


def test_a_call_that_fails_where_the_inner_object_did_not_is_a_fault(wrapped):
    fine, failed = wrapped.Outcome(1), wrapped.Outcome(error=KeyError("x"))
    assert fine.check_as_fine_as(wrapped.Outcome(2))
    assert not failed.check_as_fine_as(wrapped.Outcome(error=KeyError("y")))
    with pytest.raises(KeyError, match="x"):
        failed.check_as_fine_as(fine)
    for other in (fine, wrapped.Outcome(error=TypeError())):
        with pytest.raises(AssertionError):
            other.check_as_fine_as(failed)


@pytest.mark.slow
def test_every_target_takes_its_first_inputs(tmp_path):
    run = fuzz("--inputs", 2, "--failures", tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = {line[:24].strip(): line[24:].split() for line in run.stdout.splitlines()[2:]}
    total = counts.pop("all")
    assert len(counts) >= 34
    assert all(int(inputs) == 2 for inputs, *_ in counts.values())
    assert int(total[1]) > int(total[2]), "most inputs are worth something"


BROKEN = """
import sys
sys.path.insert(0, {tools!r})
import fuzz
from fuzz_targets.mutation import Target

def run(given):
    if given == 3:
        raise KeyError("raw")
    while given == 5:
        pass

fuzz._targets = lambda names: {{"broken": Target(lambda source: source.randrange(6), run, 0.2)}}
sys.exit(fuzz.main())
"""


@pytest.mark.slow
def test_a_raw_exception_and_a_hang_are_faults_whose_inputs_are_kept(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(BROKEN.format(tools=str(ROOT / "tools")))
    run = fuzz("--inputs", 30, "--failures", tmp_path / "kept", program=program)
    assert run.returncode == 1
    assert "FAULT broken: KeyError at " in run.stdout
    assert "FAULT broken: TooSlowError at " in run.stdout
    texts = [file.read_text() for file in (tmp_path / "kept").iterdir()]
    assert len(texts) == 2
    [raw] = [text for text in texts if "KeyError: 'raw'" in text]
    assert raw.startswith("python tools/fuzz.py --target broken --seed 0 --number ")
    assert raw.endswith("\n3\n")
