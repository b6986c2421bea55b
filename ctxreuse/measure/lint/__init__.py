"""`ctxreuse lint`: what in a recorded trace keeps a cache from hitting, and what that costs."""

from ctxreuse.measure.lint.lint_checks import LintFinding, LintReport, lint

__all__ = ["LintFinding", "LintReport", "lint"]
