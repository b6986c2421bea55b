"""RAG workflows as graphs of generations and retrievals, many at once over one engine."""
