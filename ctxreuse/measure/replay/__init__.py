"""Planning a whole trace and simulating the engine's cache."""
