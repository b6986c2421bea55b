"""Mem0 for ctxreuse: memories in the order in which the engine's prefix cache hits.

    memory = ReuseMemory(Memory.from_config(config))
    memory.search("Where does she live?", filters={"user_id": "alice"})     # planned order
    memory.messages("Where does she live?", filters={"user_id": "alice"})   # OpenAI chat messages

Nothing of mem0 is imported here: anything that searches as mem0 does can be wrapped. A wrong type
or value raises `InvalidRequestError`.
"""

from ctxreuse.pipeline.memories import tenant_of
from ctxreuse.pipeline.memory_planner import MemoryContext
from mem0_ctxreuse.planned_memory import AsyncReuseMemory, ReuseMemory, SearchableMemory

__all__ = ["AsyncReuseMemory", "MemoryContext", "ReuseMemory", "SearchableMemory", "tenant_of"]
