import json
import os
import re
import sys
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import errors
from ctxreuse.errors import CtxreuseError, MissingExtraError, describe
from ctxreuse.serving import progress_bar


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


def error_classes():
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }


def test_every_error_has_the_common_base_and_the_builtin_that_fits():
    builtin_of = {
        name: [base.__name__ for base in value.__bases__] for name, value in error_classes().items()
    }
    assert builtin_of == {
        "CtxreuseError": ["Exception"],
        "InvalidBlockError": ["CtxreuseError", "ValueError"],
        "InvalidRequestError": ["CtxreuseError", "ValueError"],
        "UnknownArgumentError": ["InvalidRequestError", "TypeError"],
        "UnknownStrategyError": ["CtxreuseError", "ValueError"],
        "BatchTooLargeError": ["CtxreuseError", "ValueError"],
        "ConversationError": ["CtxreuseError", "RuntimeError"],
        "InputFileError": ["CtxreuseError", "ValueError"],
        "EngineError": ["CtxreuseError", "RuntimeError"],
        "SharedLogError": ["CtxreuseError", "RuntimeError"],
        "MissingExtraError": ["CtxreuseError", "ImportError"],
    }


def test_the_tree_in_the_docstring_names_every_error():
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert {"CtxreuseError", *drawn} == set(error_classes())


def test_a_missing_extra_names_the_pip_command_although_nothing_was_installed(monkeypatch):
    error = MissingExtraError("ctxreuse demo", "demo")
    assert isinstance(error, CtxreuseError)
    assert str(error).startswith("ctxreuse demo needs optional packages: pip install ")

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert str(MissingExtraError("x", "demo")).endswith("pip install 'ctxreuse[demo]'")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (None, "pip install 'ctxreuse[demo]'"),
        ({"url": "file:///src/ctx%20reuse", "dir_info": {}}, "pip install '/src/ctx reuse[demo]'"),
        (
            {"url": "file:///src/it%27s", "dir_info": {"editable": True}},
            """pip install -e '/src/it'"'"'s[demo]'""",
        ),
        (
            {"url": "file:///tmp/ctxreuse-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'ctxreuse[demo] @ file:///tmp/ctxreuse-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://x.invalid/r", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"pip install 'ctxreuse[demo] @ git+https://x.invalid/r@{COMMIT}'",
        ),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="paths are written otherwise")
def test_the_command_installs_from_where_the_package_is(monkeypatch, direct_url, command):
    class Installed:
        def read_text(self, name):
            assert name == "direct_url.json"
            return direct_url and json.dumps(direct_url)

    monkeypatch.setattr(metadata, "distribution", {"ctxreuse": Installed()}.__getitem__)
    assert str(MissingExtraError("x", "demo")) == f"x needs optional packages: {command}"


def test_a_progress_bar_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[cli\]"):
        progress_bar().__enter__()


@pytest.mark.parametrize(
    ("value", "description"),
    [
        (1, "1 (int)"),
        ("1", "'1' (str)"),
        (None, "None (NoneType)"),
        ("\x1b[31m\n\ud800", r"'\x1b[31m\n\ud800' (str)"),
        ("x" * 58, f"'{'x' * 58}' (str)"),
        ("x" * 59, f"'{'x' * 58}… (str)"),
        (10**5000, "a value of type int"),
        ([10**5000], "a value of type list"),
        (Unprintable(), "a value of type Unprintable"),
        (["http://u:pw@host/v1?key=k", 5], "['http://host/v1', 5] (list)"),
        ("https://user:p@w/d@host", "'https://host' (str)"),
    ],
    ids=range(11),
)
def test_a_value_is_described_shortly_whatever_it_is(value, description):
    assert describe(value) == description


@given(st.text() | st.binary() | st.lists(st.text()))
def test_a_description_holds_at_most_60_characters_of_the_value(value):
    assert len(describe(value)) <= 60 + len(f" ({type(value).__name__})")
    assert describe(value).isprintable()
