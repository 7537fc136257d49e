"""Agents that sample in every way that vLLM has, and the distributions of that written out by hand.

`SHAPES` are the ways. `play` has agents sample so through a proxy, and `leased` gives what a trainer then gets.
`sampled_from` is what a token was drawn from, in the order in which vLLM's sampler shapes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ajet_sdk.routes import Lease
from ajet_sdk.sample import Batch
from ajet_trainer.link import Link

EPISODES, TURNS, TOKENS = 2, 2, 16
PATTERN = "[ab ]{12}"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "temperature 1": {},
    "temperature 0.3": {"temperature": 0.3},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3},
    "top_p 0.8": {"top_p": 0.8},
    "top_k 20": {"top_k": 20},
    "min_p 0.1": {"min_p": 0.1},
    "temperature 0.7, top_p 0.8, top_k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "presence 0.5, frequency 0.5": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "repetition 1.2": {"repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"11": 4, "12": -4, "13": 2}},
    "allowed_token_ids": {"allowed_token_ids": [11, 12, 13, 14]},
    "min_tokens 8": {"min_tokens": 8},
    "a grammar": {"structured_outputs": {"regex": PATTERN}},
    "a grammar, temperature 0.7": {"structured_outputs": {"regex": PATTERN}, "temperature": 0.7},
    "greedy": {"temperature": 0},
}
RAW = ("temperature 1", "temperature 0.7", "top_p 0.8", "a grammar", "a grammar, temperature 0.7", "greedy")
"""Those of `SHAPES` for which raw logprobs make a difference of their own."""
NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
"""So that no default of the engine or the model counts."""


def play(url: str, shape: str, *, model: str) -> None:
    """A group of episodes of two turns each, sampled by `shape`, which is their task."""
    for number in range(EPISODES):
        name = f"{re.sub('[^a-z0-9]+', '-', shape)}.{number}"
        said = [{"role": "user", "content": f"Tell me of number {number}"}]
        for turn in range(TURNS):
            body: dict[str, Any] = {"model": model, "messages": said, "max_tokens": TOKENS, "seed": 10 * number + turn}
            answer = httpx.post(
                f"{url}/e/{name}/v1/chat/completions", json={**body, **NEUTRAL, **SHAPES[shape]}, timeout=300,
                headers={"X-AJet-Task": shape},
            ).raise_for_status()  # fmt: skip
            content = answer.json()["choices"][0]["message"]["content"]
            said += [{"role": "assistant", "content": content}, {"role": "user", "content": "And again"}]
        reward = {"value": float(number % 2), "final": True}
        httpx.post(f"{url}/ajet/v1/episodes/{name}/rewards", json=reward, timeout=300).raise_for_status()


def leased(link: Link, *, model: str) -> Batch:
    """The one group that is ready, which is then no longer at the proxy."""
    batch = link.lease(Lease(groups=1, group_size=EPISODES, model=model, wait_s=30.0))
    assert batch is not None
    link.ack(batch.batch, 0)
    return batch


@dataclass(frozen=True, slots=True)
class ByHand:
    """The model without verl and without vLLM, and the text of each token."""

    policy: Any
    texts: Sequence[str]
    ends: int

    @classmethod
    def of(cls, folder: Path) -> ByHand:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        texts = [tokenizer.decode([token]) for token in range(policy.config.vocab_size)]
        return cls(policy, texts, policy.generation_config.eos_token_id or tokenizer.eos_token_id)

    def logits(self, ids: Sequence[int]) -> Any:
        import torch

        with torch.no_grad():
            return self.policy(input_ids=torch.tensor([list(ids)])).logits[0]

    def logprobs(
        self, ids: Sequence[int], logits: Any, start: int, end: int, shape: Mapping[str, Any]
    ) -> Iterator[tuple[float, float]]:
        """For each token of ``ids[start:end]``, sampled by `shape` after the rest: its logprob at the temperature
        alone, and in what it was sampled from. `logits` are those of `ids`."""
        heat = shape.get("temperature", 1.0)
        for place in range(start, end):
            plain = (logits[place - 1] / heat).log_softmax(dim=-1)
            drawn = self.sampled_from(logits[place - 1], ids[:start], ids[start:place], shape).log_softmax(dim=-1)
            yield float(plain[ids[place]]), float(drawn[ids[place]])

    def sampled_from(self, logits: Any, prompt: Sequence[int], said: Sequence[int], shape: Mapping[str, Any]) -> Any:
        """The logits that a token was drawn from after `said`."""
        logits, never = logits.clone(), float("-inf")
        if "structured_outputs" in shape:
            logits = self.only(logits, self.matching(said))
        if "allowed_token_ids" in shape:
            logits = self.only(logits, shape["allowed_token_ids"])
        if len(said) < shape.get("min_tokens", 0):
            logits[self.ends] = never
        for token, bias in shape.get("logit_bias", {}).items():
            logits[int(token)] += bias
        logits = penalized(logits, prompt, said, shape) / shape.get("temperature", 1.0)
        likely = logits.softmax(dim=-1)
        logits[likely < shape.get("min_p", 0.0) * likely.max()] = never
        if shape.get("top_k", 0):
            logits[logits < logits.topk(shape["top_k"]).values[-1]] = never
        if shape.get("top_p", 1.0) < 1:
            order = logits.softmax(dim=-1).sort(descending=True)
            beyond = order.values.cumsum(dim=-1) - order.values >= shape["top_p"]
            logits[order.indices[beyond]] = never
        return logits

    def only(self, logits: Any, tokens: Sequence[int]) -> Any:
        """`logits` with nothing but `tokens`."""
        import torch

        out = torch.full_like(logits, float("-inf"))
        out[list(tokens)] = logits[list(tokens)]
        return out

    def matching(self, said: Sequence[int]) -> list[int]:
        """The tokens that go on from `said` within `PATTERN`: while there is room, else the end."""
        room = 12 - sum(len(self.texts[token]) for token in said)
        if not room:
            return [self.ends]
        return [token for token, text in enumerate(self.texts) if 0 < len(text) <= room and not set(text) - set("ab ")]


def penalized(logits: Any, prompt: Sequence[int], said: Sequence[int], shape: Mapping[str, Any]) -> Any:
    """`logits` after vLLM's penalties, which count what was said, and the repetition penalty the prompt, too."""
    import torch

    counts = torch.bincount(torch.tensor(list(said), dtype=torch.int64), minlength=len(logits))
    seen = counts + torch.bincount(torch.tensor(list(prompt), dtype=torch.int64), minlength=len(logits)) > 0
    repetition = torch.where(seen, shape.get("repetition_penalty", 1.0), 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - shape.get("frequency_penalty", 0.0) * counts
    return logits - shape.get("presence_penalty", 0.0) * (counts > 0)
