"""Policies of others, for comparison."""
