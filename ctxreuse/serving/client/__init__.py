"""One engine: requests, answers, retries and what each prompt cost."""

from ctxreuse.serving.client.engine_client import EngineClient

__all__ = ["EngineClient"]
