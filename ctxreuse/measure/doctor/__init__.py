"""`ctxreuse doctor`: why an engine's prefix cache does not hit, and what to do about it."""

from ctxreuse.measure.doctor.doctor_config import DoctorConfig
from ctxreuse.measure.doctor.examination import examine
from ctxreuse.measure.doctor.findings import finding_lines, findings_json, is_healthy, verdict

__all__ = ["DoctorConfig", "examine", "finding_lines", "findings_json", "is_healthy", "verdict"]
