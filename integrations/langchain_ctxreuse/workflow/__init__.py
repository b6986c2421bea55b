"""Workflows as LangChain components, and LangChain components in workflows."""
