"""The models that answer an agent's request."""
