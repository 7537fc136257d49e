"""verl's FSDP engine, which computes each token that rows of a micro-batch share once (see `ajet_trainer.forest`).

The rows come as they are and the model runs over their forest. What it found is gathered back into the layout of the
rows, before a loss reads it. So losses, their means and their metrics are those of the rows. A gather adds up the
gradients of what is read several times: the gradient is that of the rows too, up to the rounding of sums.

The model's head is asked once about each token of a response, at each temperature, and about prompts not at all. It
has most of the numbers of a small model's forward pass.

Rows that share prefixes go into the same micro-batch, whose limit counts the forest's tokens. A larger forest is cut,
and a model of costs says where.

verl finds these engines in its registry, under the vendor of the variable ``VERL_ENGINE_VENDOR``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.functional import pad
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ajet_trainer.backends.verl import VENDOR
from ajet_trainer.backends.verl.forest_attention import SPANS, block_mask, spans_of
from ajet_trainer.backends.verl.micro_batches import divided
from ajet_trainer.forest import BLOCK, Ints, Prices, cut, forest_of, prices, reading

FIGURES = ("calculate_entropy", "calculate_sum_pi_squared")
"""Outputs that verl may ask for besides logprobs."""


class ForestRows:
    """The difference to an engine of verl's with a language model's head."""

    model_config: Any
    _autocast_dtype: torch.dtype
    prices: Prices
    _by_spans: bool  # or by blocks
    _computed: tuple[int, int, int]  # of the micro-batch at hand: tokens, logprobs, and pairs in attention

    def _build_module(self) -> Any:
        module = super()._build_module()  # type: ignore[misc]
        self._by_spans = module.config._attn_implementation == "sdpa"
        if self._by_spans:
            module.config._attn_implementation = SPANS
        self.prices = prices_of(module)
        return module

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        work = super().forward_backward_batch  # type: ignore[misc]
        return divided(self._cut, work, data, loss_function, forward_only)

    def _cut(self, data: TensorDict, limit: int, agree: Callable[[int], int]) -> list[list[int]]:
        """The parts that cost the least."""
        return cut(rows_of(data), prompts_of(data), heats_of(data), limit, self.prices, agree)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
        if not forward_only:
            lengths = micro_batch["input_ids"].offsets().diff()
            tokens, pairs = int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum())
            for name, counts in (("row", (tokens, tokens, pairs)), ("computed", self._computed)):
                output["metrics"][f"{name}_tokens"] = Metric("sum", counts[0])
                output["metrics"][f"{name}_operations"] = Metric("sum", self.prices.of(*counts))
        return loss, output

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        forest, warmth = forest_of(rows_of(micro_batch)), micro_batch["temperature"]
        device, nodes = micro_batch["input_ids"].device, len(forest.ids)
        padding = 0 if self._by_spans else -nodes % BLOCK
        read = reading(forest, prompts_of(micro_batch), heats_of(micro_batch))
        self._computed = nodes, len(read.nodes), forest.seen

        def put(values: Ints) -> torch.Tensor:
            return torch.from_numpy(np.concatenate((values, np.zeros(padding, dtype=np.int64)))).to(device)

        inputs = {
            "input_ids": put(forest.ids)[None],
            "position_ids": put(forest.depth)[None],
            "logits_to_keep": torch.from_numpy(read.nodes).to(device),
        }
        if self._by_spans:
            inputs["forest_spans"] = spans_of(forest, device, self._autocast_dtype)
        else:
            exit_ = np.concatenate((forest.exit, np.arange(nodes, nodes + padding) + 1))  # padding sees itself
            inputs["attention_mask"] = block_mask(exit_, device)
        return inputs, {
            "temperature_is_one": not isinstance(warmth, torch.Tensor) and float(warmth) == 1.0,
            "temperature_rmpad": torch.from_numpy(read.heat).to(device),
            "input_ids_rmpad_rolled": torch.from_numpy(read.labels).to(device),
            "pad_size": 0,
            "index": torch.from_numpy(read.index).to(device),
        }

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        index = output_args["index"]
        asked = {name: tu.get_non_tensor_data(micro_batch, name, False) for name in FIGURES}
        read, ends = output_args["input_ids_rmpad_rolled"], micro_batch["input_ids"].offsets()
        found = super().prepare_model_outputs(output, output_args, in_one_row(read, asked), None)  # type: ignore[misc]
        return {
            name: torch.nested.nested_tensor_from_jagged(pad(value.values(), (0, 1))[index], ends)
            for name, value in found.items()
        }


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor=VENDOR)
class ForestEngine(ForestRows, FSDPEngineWithLMHead):  # type: ignore[misc]
    """On GPUs."""


# Micro-batches -------------------------------------------------------------------------------------------------------


def rows_of(data: TensorDict) -> list[Ints]:
    """The tokens of each row of `data`, int64 ``[T]``."""
    values, ends = (part.cpu().numpy() for part in (data["input_ids"].values(), data["input_ids"].offsets()))
    return np.split(values, ends[1:-1])


def prompts_of(data: TensorDict) -> list[int]:
    """Counts the tokens at the beginning of each row of `data` whose logprobs no loss reads."""
    lengths: list[int] = data["prompts"].offsets().diff().tolist()
    return lengths


def heats_of(data: TensorDict) -> list[float]:
    """The temperature of each row, of which `data` has one for all, or a tensor ``[B]``."""
    warmth = data["temperature"]
    return warmth.tolist() if isinstance(warmth, torch.Tensor) else [float(warmth)] * len(data)


def in_one_row(tokens: torch.Tensor, asked: dict[str, Any]) -> TensorDict:
    """`tokens`, int64 ``[T]``, as verl's engine takes them: packed, as one row of a jagged ``[1, T]``. It computes the
    `FIGURES` `asked` for."""
    row = torch.nested.nested_tensor_from_jagged(tokens, torch.tensor([0, len(tokens)], device=tokens.device))
    return tu.get_tensordict({"input_ids": row}, {"use_remove_padding": True, "use_fused_kernels": False} | asked)


# What the model takes -------------------------------------------------------------------------------------------------


def prices_of(module: Any) -> Prices:
    """The multiplications of `module`. An embedding is looked up, which costs nothing."""
    config, head = module.config, module.get_output_embeddings().weight.numel()
    table = 0 if config.tie_word_embeddings else module.get_input_embeddings().weight.numel()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    body = sum(one.numel() for one in module.parameters()) - head - table
    return prices(body, head, config.num_hidden_layers, heads * width)
