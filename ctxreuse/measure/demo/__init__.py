"""The embedded demo: real documentation, real retrieval, no server and no download."""
