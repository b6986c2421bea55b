"""Batches that no single process plans: on Ray Data."""

from ctxreuse.distributed.ray_data import plan_dataset

__all__ = ["plan_dataset"]
