"""Memories that keep their place in a conversation."""
