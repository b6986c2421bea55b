"""What was sent: a log of each tenant's requests, and the views that it feeds."""
