"""`ctxreuse bench --part quality`: whether answers stay as good when blocks are reordered."""

from ctxreuse.measure.quality.quality_results import QualityResults, quality_output
from ctxreuse.measure.quality.quality_run import QualityConfig, run
from ctxreuse.measure.quality.question_sets import sets_to_ask

__all__ = ["QualityConfig", "QualityResults", "quality_output", "run", "sets_to_ask"]
