"""An agent's messages and tool results."""
