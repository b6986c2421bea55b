"""Retrieved nodes in their planned order."""
