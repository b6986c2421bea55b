"""Whether an engine's answers stay as good when blocks are reordered."""
