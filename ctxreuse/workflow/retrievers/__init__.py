"""Retrievers that find blocks in one go."""
