"""What `tools/house.py` measures: structure, journeys, growth and overhead."""
