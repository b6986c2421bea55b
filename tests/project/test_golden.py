"""The tool that compares plans and prompts with the golden files; `make golden` runs it on all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "golden.py"
GOLDEN = Path(__file__).resolve().parents[1] / "golden"

pytestmark = pytest.mark.skipif(not TOOL.is_file(), reason="no tools here")


def check(*arguments):
    return subprocess.run(
        [sys.executable, str(TOOL), "check", "--quick", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_difference_is_found_and_shown(tmp_path):
    kept = json.loads((GOLDEN / "mem0.json").read_text(encoding="utf-8"))
    kept["search"]["list"][0][0] += " and more"
    del kept["contexts"]
    kept["of old"] = "gone"
    (tmp_path / "mem0.json").write_text(json.dumps(kept), encoding="utf-8")
    done = check("mem0", "--golden", str(tmp_path))
    assert done.returncode == 1
    assert "mem0.messages: equal" in done.stdout
    for changed in ("search", "contexts", "of old"):
        assert f"mem0.{changed}: DIFFERENT" in done.stdout
    assert "id-a and more" in done.stdout
    assert done.stdout.endswith("differs: mem0\n")


def test_areas_without_their_data_are_skipped_and_said_so(monkeypatch):
    monkeypatch.delenv("CTXREUSE_DATA", raising=False)
    done = check("traces")
    assert done.returncode == 0
    assert "skipped; set CTXREUSE_DATA" in done.stdout
