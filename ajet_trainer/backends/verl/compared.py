"""The trainer's logprobs of what engines answered: see `ajet_trainer.agreement` for what they are compared for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from ajet_trainer import engines
from ajet_trainer.agreement import difference, name_of, shown_by, tolerance
from ajet_trainer.engines import Answer, EngineLost

PROMPT = "In the beginning there were seven rivers, and the longest of them was called"
TOKENS = 32
"""Of an answer. Longer ones would tell little more."""
LOOK_S = 120.0
"""How long an answer may take: an engine that has just been started compiles."""
Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of its answer."""


def answers(urls: Sequence[str], model: str, prompt: Sequence[int], key: str) -> list[Answer]:
    """How each engine goes on from `prompt`, as `model`. Raises `EngineLost`."""
    found: dict[str, Answer] = {}

    def tell(url: str) -> None:
        try:
            with engines.asking(url, LOOK_S, key) as engine:
                found[url] = engines.answer(engine, model, prompt, TOKENS)
        except (httpx.HTTPError, ValueError) as error:
            said = f"does not answer as {model!r}, and so cannot be compared with the trainer"
            raise EngineLost(f"the engine at {url} {said}: {engines.words(error)}") from error

    engines.each(urls, tell)
    return [found[url] for url in urls]


def check(url: str, answer: Answer, own: Sequence[float], served: str | None, trained: str | None) -> None:
    """Raises `EngineLost` if the engine's logprobs are further from the trainer's `own` than the dtypes explain, in
    which it is `served` and `trained`."""
    dtypes = (served or shown_by(answer), trained)
    apart, most = difference(answer.logprobs, own), tolerance(dtypes, answer)
    if apart > most:
        shown = " and ".join(dict.fromkeys(map(name_of, dtypes)))
        raise EngineLost(
            f"the engine at {url} does not compute what was pushed to it: its logprobs of {len(answer.ids)} tokens of "
            f"its own are {apart:.2g} nats from the trainer's, and {shown} explains {most:.2g}. Either it serves "
            "another model, or it cannot take new weights of this one while it runs (vLLM's log names weights that "
            "were not loaded). Nothing was trained"
        )


def dtype_of(config: DictConfig) -> str | None:
    """What verl's actor computes in, by its `config`; None where that is not known here."""
    actor = config.actor_rollout_ref.actor
    if not str(actor.strategy).startswith("fsdp"):
        return None
    return str(OmegaConf.select(actor, "fsdp_config.mixed_precision.param_dtype") or "bf16")


def dtype_of_launched(config: DictConfig) -> str:
    """What the engines compute in that verl launches."""
    rollout = config.actor_rollout_ref.rollout
    return str(rollout.get("quantization") or rollout.dtype)


def logprobs_of(worker: Any, texts: Sequence[Text], *, packed: bool) -> list[list[float]] | None:
    """The logprobs of verl's training `worker`, at temperature 1, of each answer in `texts`. Every process computes the
    same. None in one that has no part of the output."""
    found = worker.infer_batch(batch_of(texts, packed=packed))
    if found is None:
        return None
    mask = nested([torch.ones(len(answer), dtype=torch.int64) for _, answer in texts])
    return [one.float().tolist() for one in response_from_nested(found["log_probs"].cpu(), mask).unbind()]


def nested(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def batch_of(texts: Sequence[Text], *, packed: bool) -> TensorDict:
    """`texts` as one micro-batch of verl's."""
    whole = [torch.tensor([*prompt, *answer]) for prompt, answer in texts]
    mask = nested([torch.ones(len(answer), dtype=torch.int64) for _, answer in texts])
    return tu.get_tensordict(
        {
            "input_ids": nested(whole), "position_ids": nested([torch.arange(len(one)) for one in whole]),
            "prompts": nested([torch.tensor(list(prompt)) for prompt, _ in texts]),
            "responses": nested([torch.tensor(list(answer)) for _, answer in texts]),
            "response_mask": mask, "loss_mask": mask,
        },
        {
            "temperature": 1.0, "pad_token_id": 0, "use_remove_padding": packed, "use_dynamic_bsz": True,
            "use_fused_kernels": False, "max_token_len_per_gpu": sum(map(len, whole)), "calculate_entropy": True,
            "compute_loss": False,
        },
    )  # fmt: skip
