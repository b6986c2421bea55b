"""The `ctxreuse` command."""
