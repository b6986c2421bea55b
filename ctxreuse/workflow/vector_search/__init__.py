"""Step-wise vector search, shared by all requests."""
