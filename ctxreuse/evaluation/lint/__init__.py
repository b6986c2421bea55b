"""`ctxreuse lint`: what in a recorded trace keeps a cache from hitting, and what that costs."""

from ctxreuse.evaluation.lint.checks import lint
from ctxreuse.evaluation.lint.lint_report import LintFinding, LintReport

__all__ = ["LintFinding", "LintReport", "lint"]
