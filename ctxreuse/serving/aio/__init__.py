"""Helpers for asyncio: sync callers, tasks, closing, limits."""
