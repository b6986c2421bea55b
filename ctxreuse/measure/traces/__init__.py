"""Corpora and traces as files: reading them, and recording an application's."""
