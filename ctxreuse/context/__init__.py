"""Frozen values and how they are rendered: no state, no I/O."""
