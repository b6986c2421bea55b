"""Results of measured runs: one file format, its tables, and answer scores."""
