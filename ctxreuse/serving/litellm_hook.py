"""A hook of LiteLLM's proxy that plans the documents of chat requests before they are sent.

In the proxy's configuration: `litellm_settings: {callbacks: ctxreuse.serving.litellm_hook.hook}`
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from fastapi import HTTPException
from litellm.integrations.custom_logger import CustomLogger

from ctxreuse.context.lru_map import LRUMap
from ctxreuse.context.reported_usage import usage_in
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.engine_options import tenant_salt
from ctxreuse.pipeline.prompt_turn import PlannedPrompt
from ctxreuse.planner import ReusePlanner
from ctxreuse.rules.answers import takes_salt
from ctxreuse.serving.door.chat_bodies import OURS, ChatPlanner, PromptBody, json_words

_MOST_IN_FLIGHT = 10_000


class ReuseHook(CustomLogger):  # type: ignore[misc]
    """Plans `documents` of a request's body or metadata, as `ctxreuse serve` does.

    A tenant is the team of the API key, else the key. What was answered is reported to the planner.
    """

    def __init__(self, planner: ReusePlanner | None = None) -> None:
        super().__init__()
        self.planner = ReusePlanner() if planner is None else planner
        self._salt_key = takes_salt(self.planner.cache) and os.environ.get("CTXREUSE_KEYS_SECRET")
        self._chats = ChatPlanner(self.planner, "litellm_hook")
        self._sent: LRUMap[str, PlannedPrompt] = LRUMap(_MOST_IN_FLIGHT)

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        """Return a request with its documents in the order that hits the engine's cache."""
        beside = data.get("metadata") or {}
        ours = {name: beside[name] for name in OURS if name in beside}
        tenant = user_api_key_dict.team_id or user_api_key_dict.token or ""
        if self._salt_key and "messages" in data:  # a caller's own would open another's cache
            data = {**data, "cache_salt": tenant_salt(tenant, self._salt_key)}
        try:
            body = PromptBody.of({**ours, **data}, {})
        except InvalidRequestError as error:
            raise HTTPException(400, json_words(error)) from error
        if body is None:
            return data
        planned, written = await self._chats.planned(body, tenant)
        if planned is not None and planned.plans:
            self._sent.put(data["litellm_call_id"], planned)
        sent = body.fields if written is None else written
        left = {name: one for name, one in beside.items() if name not in OURS}
        return {**sent, "metadata": left} if ours else sent

    async def async_log_success_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: datetime, end_time: datetime
    ) -> None:
        """Report what an answer's usage says of the cache."""
        planned, told = self._sent.pop(kwargs["litellm_call_id"]), usage_in(response_obj)
        if planned is not None and told is not None:
            seconds = (end_time - start_time).total_seconds()
            self.planner.report_usage(planned.plans, **told._asdict(), seconds=seconds)

    async def async_post_call_failure_hook(
        self, request_data: dict[str, Any], *arguments: Any, **named: Any
    ) -> None:
        """Take back what was not answered."""
        self._chats.gateway.forget(self._sent.pop(request_data.get("litellm_call_id", "")))


hook = ReuseHook()
