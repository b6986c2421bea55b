"""Run it: `.venv/bin/python benchmarks/public_data --help`."""

import sys
from pathlib import Path

if not __package__:  # Python puts the folder itself in front, not the one that holds the package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from public_data.commands import main

main()
