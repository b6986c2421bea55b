from public_data_helpers import folder, run  # noqa: F401  # fixtures
from served_engines import served  # noqa: F401
