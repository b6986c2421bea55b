"""A chat model that plans its prompts and calls the model inside it."""
