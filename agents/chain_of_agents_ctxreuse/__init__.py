"""The names of `chain_of_agents`, under one that says whose package it is."""

from chain_of_agents import (
    Answer,
    ChainOfAgents,
    ChainPrompts,
    ManagerError,
    Step,
    Trace,
    UnreadError,
)

__all__ = [
    "Answer",
    "ChainOfAgents",
    "ChainPrompts",
    "ManagerError",
    "Step",
    "Trace",
    "UnreadError",
]
