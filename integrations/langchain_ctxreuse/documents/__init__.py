"""Retrieved documents in their planned order."""
