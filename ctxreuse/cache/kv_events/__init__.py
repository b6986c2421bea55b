"""Following the events that an engine publishes about its cache blocks."""
