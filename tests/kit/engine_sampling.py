"""The sampling of the scripted engine where a request does not say it, and its answers if it is asked about that.

A proxy asks once for each model. These questions are noted apart from agents' requests, and no fault meets them.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from dataclasses import dataclass, field
from typing import Any

from ajet_proxy.core.protocol.sampling import OFF, RENDER
from tests.kit.engine_tokens import IM_END, logprob_of

ECHOED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


@dataclass(slots=True)
class Sampling:
    """The `defaults` of its model, which an engine that `renders` tells, and another one shows. Its logprobs are
    `processed` or raw. It may refuse all questions, with `status`, or answer them only once it `may`. `strict` tools
    become a grammar, or `all_tools`. `asked` is what it was asked, by route and body."""

    defaults: dict[str, float] = field(default_factory=dict)
    processed: bool = False
    renders: bool = True
    status: int = 200
    strict: bool = True
    all_tools: bool = False
    may: asyncio.Event | None = None
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def concerns(self, path: str, body: Any) -> bool:
        """Tell whether a request is such a question."""
        said = body if isinstance(body, dict) else {}
        of_response = said.keys() - {"model"} == {"input", "max_output_tokens", "store"} and said["input"] == "?"
        return path.endswith(RENDER) or said.get("prompt") == [11] or of_response

    async def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        self.asked.append((path, body))
        if self.may is not None:
            await self.may.wait()
        if self.status != 200:
            return self.status, b"{}"
        if path.endswith(RENDER):
            return (200, json.dumps(self._rendered(body)).encode()) if self.renders else (404, b"{}")
        if "input" in body:
            told = {name: self._default(name) for name in ECHOED}
            return 200, json.dumps({"object": "response", "status": "incomplete", "output": [], **told}).encode()
        return 200, json.dumps(self._completion(body)).encode()

    def _default(self, name: str) -> float:
        return self.defaults.get(name, OFF[name][0])

    def _rendered(self, body: Any) -> Any:
        params: dict[str, Any] = {"max_tokens": 1, **self.defaults}
        tools = body.get("tools") or ()
        if tools and (self.all_tools or (self.strict and any(tool["function"].get("strict") for tool in tools))):
            params["structured_outputs"] = {"structural_tag": "{}"}
        rendered = {"request_id": "r", "token_ids": [11], "sampling_params": params}
        return [rendered] if "prompt" in body else rendered

    def _completion(self, body: Any) -> dict[str, Any]:
        """Answers of one token, drawn from the tokens that have a bias."""
        raw = {token: logprob_of([11], token) for token in (*range(11, 139), *map(int, body.get("logit_bias", ())))}
        biases = {int(token): bias for token, bias in body.get("logit_bias", {"11": 0.0}).items()}
        logits = {token: 30 + raw[token] + bias for token, bias in biases.items()}
        penalty = body.get("repetition_penalty", self._default("repetition_penalty"))
        if 11 in logits:
            logits[11] /= penalty
        tokens = self._drawn(logits, body)
        logprob = 0.0 if self.processed else raw[tokens[0]]
        top = {f"token_id:{token}": raw[token] for token in body.get("logprob_token_ids", ())}
        told = {"token_logprobs": [logprob], "top_logprobs": [top]}
        choices = [
            {"index": place, "token_ids": [token], "logprobs": told,
             "finish_reason": "stop" if token == IM_END else "length"}
            for place, token in enumerate(tokens)
        ]  # fmt: skip
        return {"object": "text_completion", "model": body.get("model"), "choices": choices}

    def _drawn(self, logits: dict[int, float], body: Any) -> list[int]:
        best = max(logits.values())
        if body.get("temperature") == 0:
            return [max(logits, key=lambda token: logits[token])]
        top_k = int(body.get("top_k", self._default("top_k")))
        kept = sorted(logits, key=lambda token: -logits[token])[: top_k if top_k > 0 else None]
        weights = {token: math.exp(logits[token] - best) for token in kept}
        min_p = body.get("min_p", self._default("min_p"))
        fair = {token: weight for token, weight in weights.items() if weight >= min_p}
        return random.Random(1).choices([*fair], [*fair.values()], k=body.get("n", 1))
