import pytest
from langchain_model_helpers import RecordingModel


@pytest.fixture
def inner() -> RecordingModel:
    """Return a model that keeps what it was sent, to be wrapped."""
    return RecordingModel()
