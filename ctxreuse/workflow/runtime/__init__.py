"""Running graphs: one run, its stages, and speculation."""
