"""Workflows as graphs: building, checking and drawing them."""
