"""The names of `chain_of_agents`, under one that says whose package it is."""

from chain_of_agents import *  # noqa: F403 - all names, and only those
from chain_of_agents import __all__ as __all__
