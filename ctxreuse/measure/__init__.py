"""Traces in, plans and hit ratios out: replaying real requests without an engine."""
