"""The names of `chain_of_agents`, under one that says whose package it is."""

from chain_of_agents import *  # noqa: F403
from chain_of_agents import __all__  # noqa: F401
