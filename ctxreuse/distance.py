"""The papers' context distance under its public name."""

from ctxreuse.ordering.paper import context_distance, pairwise_distances

__all__ = ["context_distance", "pairwise_distances"]
