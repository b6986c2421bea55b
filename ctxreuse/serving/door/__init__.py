"""The server `ctxreuse serve`: a door to planner, pipeline and pool for every language."""
