"""What `tools/fuzz.py` feeds with hostile inputs, area by area.

Each area has its targets in `TARGETS`, by name.
"""
