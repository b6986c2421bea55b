"""Language models and embedders that workflows call."""
