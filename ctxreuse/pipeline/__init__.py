"""What all frameworks share: prompts are read, planned and written back."""
