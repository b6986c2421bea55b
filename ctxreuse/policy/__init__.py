"""Pure decisions: in which order blocks stand, and in which order requests run."""

from ctxreuse.policy.view import Arrangement, Policy, View

__all__ = ["Arrangement", "Policy", "View"]
