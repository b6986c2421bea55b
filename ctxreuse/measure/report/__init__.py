"""Results that people can look at: an HTML page, and pictures (extra `report`)."""

from ctxreuse.measure.report.report_page import page, write_pictures, write_report

__all__ = ["page", "write_pictures", "write_report"]
