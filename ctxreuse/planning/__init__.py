"""The planner's state and its results."""
