"""What a chain did, and a page that shows it."""
