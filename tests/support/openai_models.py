"""LangChain's and LlamaIndex's own OpenAI models, in front of an engine that is in this process."""

from typing import Any

import httpx

URL = "http://engine/v1"


def clients_of(transport: Any) -> tuple[httpx.Client, httpx.AsyncClient]:
    return httpx.Client(transport=transport), httpx.AsyncClient(transport=transport)


def chat_openai(http: Any, ahttp: Any, **options: Any) -> Any:
    """Return LangChain's model, which asks through clients of the test's."""
    from langchain_openai import ChatOpenAI  # slow to import

    settings = {"model": "emulated", "base_url": URL, "api_key": "none", "max_retries": 0}
    clients = {"http_client": http, "http_async_client": ahttp}
    return ChatOpenAI(**{**settings, **clients, **options})


def openai_like(http: Any, ahttp: Any, **options: Any) -> Any:
    """Return LlamaIndex's model, which asks through clients of the test's."""
    from llama_index.llms.openai_like import OpenAILike  # slow to import

    settings = {"model": "emulated", "api_base": URL, "api_key": "none", "max_retries": 0}
    of_the_model = {"context_window": 100_000, "is_chat_model": True}
    clients = {"http_client": http, "async_http_client": ahttp}
    return OpenAILike(**{**settings, **of_the_model, **clients, **options})
