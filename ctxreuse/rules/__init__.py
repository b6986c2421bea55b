"""What a cache keeps, for how long, and what that is worth: the one place where caches differ."""
