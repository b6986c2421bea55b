"""Ready-made workflows."""
