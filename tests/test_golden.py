"""Plans and prompts are byte for byte what the golden files say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "golden.py"
GOLDEN = Path(__file__).parent / "golden"

pytestmark = pytest.mark.skipif(not TOOL.is_file(), reason="no tools here")


def check(*areas, golden=None):
    more = [] if golden is None else ["--golden", str(golden)]
    return subprocess.run(
        [sys.executable, str(TOOL), "check", "--quick", *more, *areas],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "area",
    [
        "core",
        "langchain",
        "llamaindex",
        "mem0",
        "agents",
        "serving",
        "workflow",
        "commands",
        "traces",
    ],
)
def test_nothing_has_changed(area):
    if area == "traces" and not os.environ.get("CTXREUSE_DATA"):
        pytest.skip("needs the public data: set CTXREUSE_DATA to its folder")
    done = check(area)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


def test_a_difference_is_found_and_shown(tmp_path):
    kept = json.loads((GOLDEN / "core.json").read_text(encoding="utf-8"))
    kept["request_ids"][0] += " and more"
    kept["of old"] = "gone"
    (tmp_path / "core.json").write_text(json.dumps(kept), encoding="utf-8")
    done = check("core", golden=tmp_path)
    assert done.returncode == 1
    assert "core.online: equal" in done.stdout
    assert "core.request_ids: DIFFERENT" in done.stdout
    assert "core.of old: DIFFERENT" in done.stdout
    assert " and more" in done.stdout


def test_areas_without_their_data_are_skipped_and_said_so(monkeypatch):
    monkeypatch.delenv("CTXREUSE_DATA", raising=False)
    done = check("traces")
    assert done.returncode == 0
    assert "skipped; set CTXREUSE_DATA" in done.stdout
