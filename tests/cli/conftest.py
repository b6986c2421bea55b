from cli_helpers import run  # noqa: F401  # a fixture
