"""`ctxreuse doctor`: why an engine's prefix cache does not hit, and what to do about it."""

from ctxreuse.evaluation.doctor.examination import DoctorConfig, examine

__all__ = ["DoctorConfig", "examine"]
