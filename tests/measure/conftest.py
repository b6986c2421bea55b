from cli_helpers import run  # noqa: F401  # fixtures
from served_engines import served  # noqa: F401
