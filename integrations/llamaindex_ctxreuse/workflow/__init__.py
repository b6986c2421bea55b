"""Workflows as LlamaIndex components, and LlamaIndex components in workflows."""
