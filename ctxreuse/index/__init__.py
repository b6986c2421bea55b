"""What was sent, so probably stands in the engine's prefix cache."""
