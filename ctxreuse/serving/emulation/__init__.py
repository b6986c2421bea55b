"""An emulated engine: no socket, no model, no GPU."""
