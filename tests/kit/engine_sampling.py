"""How the scripted engine samples where a request does not say, and what it answers if it is asked about that.

A proxy asks once for each model. These questions are noted apart from agents' requests, and no fault meets them.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from tests.kit.engine_tokens import logprob_of

RENDER = "/render"


@dataclass(slots=True)
class Sampling:
    """The `defaults` of its model, None for an engine that has no render route. Its logprobs are `processed` or raw; it
    may take `no_bias`, or answer such questions only after `delay_s`. `strict` tools become a grammar, or `all_tools`.
    `asked` is what it was asked, by route and body."""

    defaults: dict[str, float] | None = field(default_factory=dict)
    processed: bool = False
    no_bias: bool = False
    strict: bool = True
    all_tools: bool = False
    delay_s: float = 0.0
    status: int = 400
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def concerns(self, path: str, body: Any) -> bool:
        """Whether a request is such a question."""
        biases = (body.get("logit_bias") or {}) if isinstance(body, dict) else {}
        return path.endswith(RENDER) or list(biases.values()) == [100]

    async def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        self.asked.append((path, body))
        await asyncio.sleep(self.delay_s)
        if self.defaults is None and path.endswith(RENDER):
            return 404, b'{"detail":"Not Found"}'
        if not path.endswith(RENDER):
            return (self.status, b"{}") if self.no_bias else (200, json.dumps(self._certain(body)).encode())
        params: dict[str, Any] = {"max_tokens": 1, **(self.defaults or {})}
        tools = body.get("tools") or ()
        if tools and (self.all_tools or (self.strict and any(tool["function"].get("strict") for tool in tools))):
            params["structured_outputs"] = {"structural_tag": "{}"}
        rendered = {"request_id": "r", "token_ids": [1], "sampling_params": params}
        return 200, json.dumps([rendered] if "prompt" in body else rendered).encode()

    def _certain(self, body: Any) -> dict[str, Any]:
        (token,) = map(int, body["logit_bias"])
        logprob = 0.0 if self.processed else logprob_of(body["prompt"], token)
        choice = {"index": 0, "text": "", "logprobs": {"token_logprobs": [logprob]}, "token_ids": [token]}
        choice["finish_reason"] = "length"
        return {"object": "text_completion", "model": body.get("model"), "choices": [choice]}
