"""A chat engine whose prompts only grow."""
