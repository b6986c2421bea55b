"""The tools that try a release find what is wrong with one."""

import re
import tomllib
from pathlib import Path

import pytest
import typer

from ctxreuse.cli.command_line import app

TOOLS = Path(__file__).resolve().parents[2] / "tools"

pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="no tools here")


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))


@pytest.fixture
def project():
    return {
        "name": "us",
        "dependencies": ["numpy>=2.0", "Some_Name>=1.2,<3"],
        "optional-dependencies": {
            "a": ["some.name>=1.10", "other>=1 ; python_version >= '3'"],
            "gpu": ["torch>=2.4"],
            "all": ["us[a]"],
        },
    }


def test_the_lowest_version_is_the_highest_of_the_lower_bounds_that_all_have(tools, project):
    from lowest_versions import lowest_versions

    assert lowest_versions(project) == ["numpy==2.0", "other==1", "some-name==1.10"]

    from lowest_versions import lowest_versions
    from release_environments import ReleaseError

    project["dependencies"].append("loose")
    with pytest.raises(ReleaseError, match="loose has no lower bound"):
        lowest_versions(project)


def test_uv_is_told_what_pip_is_told(tools):
    from release_environments import uv_settings

    lines = [
        ":env:.find-links='/b'",
        "global.find-links='/a /c'",
        "global.extra-index-url='\\nfile:///x\\nfile:///y'",
        "install.timeout='7'",
        "global.timeout='5'",
        "global.cert='/certs.pem'",
        "download.cert='/others.pem'",
        "global.no-such-thing='1'",
    ]
    assert uv_settings(lines, {"SSL_CERT_FILE": "/mine.pem"}) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/b",
        "UV_INDEX": "file:///x file:///y",
        "UV_HTTP_TIMEOUT": "7",
    }
    assert uv_settings(["global.find-links='/a /c'"], {})["UV_FIND_LINKS"] == "/a,/c"


@pytest.mark.parametrize(
    ("extras", "extra", "state", "fault"),
    [
        (("report",), "report", "works", ""),
        (("report",), "all", "works", ""),
        (("report",), "", "names its extra", ""),
        (("report",), "openai", "names its extra", ""),
        (("report",), "openai", "works", ""),  # what it needs comes with something else, too
        (("report",), "report", "names its extra", "does not work"),
        (("report",), "all", "names its extra", "does not work"),
        (("report",), "", "works", "is for nothing"),
        (("gpu",), "all", "names its extra", ""),
        (("ray",), "all", "names its extra", ""),
        (("litellm",), "all", "names its extra", ""),
        ((), "", "works", ""),
        ((), "", "names its extra", "does not work"),
        (("report",), "openai", "fails", "a traceback"),
    ],
)
def test_a_feature_works_with_its_extra_and_says_so_without(tools, extras, extra, state, fault):
    from installed_features import Feature
    from release_check import fault_of

    said = "a traceback" if state == "fails" else ""
    found = fault_of(Feature("one", print, extras), extra, state, said)
    assert fault in found
    assert bool(found) == bool(fault)


def test_every_extra_has_a_feature(tools):
    from installed_features import FEATURES

    project = tomllib.loads((TOOLS.parent / "pyproject.toml").read_text())["project"]
    used = {extra for feature in FEATURES for extra in feature.extras}
    assert used | {"all"} == set(project["optional-dependencies"])


def raising(error):
    def use():
        raise error

    return use


@pytest.mark.parametrize(
    ("message", "state"),
    [
        ("one needs optional packages: pip install 'ctxreuse[one]'", "names its extra"),
        ("one needs optional packages: pip install -e '/src/it[one]'", "names its extra"),
        ("one needs optional packages: pip install 'ctxreuse[one] @ file:///a'", "names its extra"),
        ("one needs optional packages: pip install 'ctxreuse[two]'", "fails"),
        ("No module named 'one'", "fails"),
    ],
)
def test_an_error_says_what_to_install_or_is_a_fault(tools, message, state):
    from installed_features import Feature, outcome

    assert outcome(Feature("one", raising(ImportError(message)), ("one",)))[0] == state


def test_anything_else_that_goes_wrong_is_a_fault_and_placeholders_are_named(tools):
    from installed_features import Feature, outcome

    assert outcome(Feature("one", raising(ValueError("no")), ("one",)))[0] == "fails"
    assert outcome(Feature("one", print, ("one",))) == ("works", "")
    missing = ModuleNotFoundError("No module named 'theirs'", name="theirs")
    foreign = Feature("one", raising(missing), ("one",), foreign="theirs")
    assert outcome(foreign)[0] == "names its extra"
    from release_check import without_address

    urls = {"Source": "https://ctxreuse.invalid/source", "Issues": "https://host.example/issues"}
    assert without_address({"urls": urls}) == ["Source"]


def test_files_that_should_not_be_published_are_found(tools):
    from release_check import IN_SDIST, PACKAGES, faults_of_sdist, faults_of_wheel

    whole = [*IN_SDIST, ".gitignore", "PKG-INFO"]
    assert faults_of_sdist([*whole, "tests/serving/.npmrc"]) == []
    assert faults_of_sdist([*whole[1:], ".venv/bin/python", "tools/__pycache__/a.pyc"]) == [
        f"the sdist lacks {IN_SDIST[0]}",
        "the sdist holds .venv/bin/python",
        "the sdist holds tools/__pycache__/a.pyc",
    ]
    faults = faults_of_wheel([f"{package}/__init__.py" for package in PACKAGES] + ["tests/a.py"])
    assert "the wheel lacks the licence" in faults
    assert "the wheel lacks mem0_ctxreuse/py.typed" in faults
    assert "the wheel lacks ctxreuse/measure/report/report.html.j2" in faults
    assert faults[-1] == "the wheel holds tests"


def test_forms_and_workflows_can_be_read_and_name_what_exists():
    yaml = pytest.importorskip("yaml")
    folder, makefile = TOOLS.parent, (TOOLS.parent / "Makefile").read_text()
    files = [*folder.glob(".github/**/*.yml"), *folder.glob(".pre-commit-config.yaml")]
    texts = [one.read_text(encoding="utf-8") for one in files]
    assert all(yaml.safe_load(text) for text in texts)
    commands = set(re.findall("`ctxreuse ([a-z]+)", "".join(texts)))
    assert commands <= set(typer.main.get_command(app).commands)
    named = re.findall("(?:tests|tools)/[\\w/.]+", "".join(texts))
    assert [one for one in named if not (folder / one).exists()] == []
    targets = re.findall("run: make ([a-z -]+)", "".join(texts))
    assert {
        one for target in targets for one in target.split() if f"\n{one}:" not in makefile
    } == set()
