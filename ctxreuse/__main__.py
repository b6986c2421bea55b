"""`python -m ctxreuse` is the `ctxreuse` command."""

from ctxreuse.cli import main

main()
