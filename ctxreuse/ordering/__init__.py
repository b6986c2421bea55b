"""Pure decisions: in which order blocks stand, and in which order requests run."""
