"""How charts show policies: no two alike in colour, and none in line."""

from __future__ import annotations

from typing import NamedTuple


class PolicyStyle(NamedTuple):
    """How a chart shows a policy."""

    colour: str
    dashes: tuple[float, ...] = ()


POLICY_STYLES = {
    "as retrieved": PolicyStyle("#8c8c8c"),
    "as sent today": PolicyStyle("#5c6f96", (9, 2, 2, 2)),
    "papers' order, online": PolicyStyle("#d98c00", (5, 2)),
    "papers' order, batch": PolicyStyle("#c2452d", (5, 2, 1, 2)),
    "ctxreuse, online": PolicyStyle("#2f86d6", (14, 1.5)),
    "ctxreuse, batch": PolicyStyle("#1fa06a", (8, 2)),
    "as retrieved, de-duplicated": PolicyStyle("#a07850", (3, 1.5)),
}
"""A policy's style in every chart."""

OTHER_STYLES = (
    PolicyStyle("#7d7aff", (3, 3)),
    PolicyStyle("#6f9a1f", (10, 3, 2, 3)),
    PolicyStyle("#a259c4", (1, 1.5)),
    PolicyStyle("#2fa3a8", (2, 1)),
    PolicyStyle("#a89600", (6, 1.5, 1, 1.5, 1, 1.5)),
    PolicyStyle("#e0679a", (4, 1)),
    PolicyStyle("#93407c", (4, 1, 1, 1)),
)
"""For policies that not every report has, in turn."""
