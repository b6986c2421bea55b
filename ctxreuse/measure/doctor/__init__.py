"""`ctxreuse doctor`: why an engine's prefix cache does not hit, and what to do about it."""
