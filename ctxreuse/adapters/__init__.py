"""What every framework integration shares."""
