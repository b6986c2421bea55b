"""The tier on a GPU, on the CPU of the torch that the real engine brings."""

import subprocess
import sys
from pathlib import Path

from vllm_environment import HOME

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/workflow/test_workflow_tiers.py"
RUN = """
import sys
import pytest
sys.path.append(sys.argv[1])  # behind this environment's own packages
sys.exit(pytest.main(sys.argv[2:]))
"""


def test_its_tests_pass_with_a_torch() -> None:
    [packages] = HOME.glob("lib/python3*/site-packages")
    command = [
        sys.executable,
        "-c",
        RUN,
        str(packages),
        TESTS,
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "needs torch" not in done.stdout
