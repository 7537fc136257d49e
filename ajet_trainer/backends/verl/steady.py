"""verl's training worker, whose gradient is the policy's: nothing is drawn by chance, and rows don't see each other.

Engines sample without dropout, so it is off while training too, with all else of its kind. What has no name here is
found by looking: before anything is trained, some rows are computed a few times, next to different neighbours. That
takes the engine, the model and the settings of the run as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch.nn.modules.dropout import _DropoutNd
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine_workers import TrainingWorker

from ajet_trainer.backends.verl import positions
from ajet_trainer.backends.verl.forest_refused import STRATEGIES
from ajet_trainer.backends.verl.micro_batches import batch_of, divided, of_padded

CHANCE = re.compile("drop|jitter")
"""A part of the names of shares of dropped values, of skipped layers and of noise."""
LONGEST = 251
"""So many tokens has a row of the check, if the model and its micro-batches have room. It is a prime number: what goes
by blocks of a pack must not fall together with rows."""
ROUNDING = 4.0
"""A row may move by so many times what it moves when only tokens behind it change, which a causal model does not see.
That is nothing, but for mixtures of experts: they multiply the tokens of all rows together."""


class Looked(NamedTuple):
    """By how much logprobs, or a critic's values, differ where they should not: means over the tokens of a row."""

    rounding: float  # other tokens behind it
    neighbour: float  # another row before it
    place: float  # behind other rows, and alone
    chance: float  # twice in training
    training: float  # in training, and not
    room: float  # what the numbers' precision explains

    @property
    def said(self) -> str:
        """The fault in words; nothing if all is well."""
        exact = ROUNDING * self.rounding
        if self.chance > exact:
            return f"what one row is computed to differs by {self.chance:.1e} from one time to the next in training"
        if self.training > max(exact, self.room):
            return f"what one row is computed to differs by {self.training:.1e} in training from what was sampled from"
        if self.neighbour > exact or self.place > max(exact, self.room) or self.rounding > self.room:
            apart = max(self.neighbour, self.place, self.rounding)
            return f"what one row is computed to differs by {apart:.1e} with what stands next to it in a micro-batch"
        return ""


class SteadyWorker(TrainingWorker):  # type: ignore[misc]
    """verl's training worker, with chance taken out of its model once that is loaded."""

    _loud: list[tuple[Any, str, float]]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def reset(self) -> None:
        torch.manual_seed(self.engine_config.seed)  # of what is drawn of a model: an adapter's start, a critic's head
        super().reset()
        if not self.model_config.use_remove_padding and isinstance(self.engine, FSDPEngine):
            self.engine.forward_backward_batch = partial(divided, of_padded, self.engine.forward_backward_batch)
        self._loud = list(quiet(parts_of(self.engine)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """The model's configuration is saved as it was."""
        with set_to(self._loud):
            return super().save_checkpoint(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def wrong(self, served: int) -> str:
        """Says what is wrong with rows here, once positions are those of engines that serve rows of up to `served`
        tokens. All processes of the worker must be asked together. Engines of other strategies are not looked at, nor
        is training with quantized values, which are scaled by all rows."""
        positions.fix(parts_of(self.engine), served)
        if self.engine_config.strategy not in STRATEGIES or getattr(self.engine, "_qat_enabled", False):
            return ""
        try:
            return look(self, packed=bool(self.model_config.use_remove_padding)).said
        except Exception as error:  # it may be the code of a model
            return f"its rows cannot be computed ({type(error).__name__}: {shorten(str(error), 300)})"


# Chance ---------------------------------------------------------------------------------------------------------------


def parts_of(engine: Any) -> Iterator[torch.nn.Module]:
    """All modules of `engine`, which may hold several models."""
    for module in engine.module if isinstance(engine.module, (list, torch.nn.ModuleList)) else [engine.module]:
        yield from module.modules()


def quiet(parts: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, str, float]]:
    """Sets to 0 what is drawn by chance in `parts` and in their configurations. Gives what these had."""
    for part in parts:
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        for holder in (part, getattr(part, "config", None)):
            for name, rate in list(vars(holder).items()) if holder is not None else ():
                if CHANCE.search(name) and type(rate) in (int, float) and rate:
                    setattr(holder, name, 0.0)
                    if holder is not part:
                        yield holder, name, rate


@contextmanager
def set_to(values: Sequence[tuple[Any, str, float]]) -> Iterator[None]:
    """Has those values in place inside."""
    for holder, name, rate in values:
        setattr(holder, name, rate)
    try:
        yield
    finally:
        for holder, name, _ in values:
            setattr(holder, name, 0.0)


# Neighbours -----------------------------------------------------------------------------------------------------------


def look(worker: TrainingWorker, *, packed: bool) -> Looked:
    """Computes rows of chance tokens next to others. Every process of `worker` computes the same ones."""
    engine, config = worker.engine, worker.model_config.hf_config.get_text_config()
    length = min(LONGEST, getattr(config, "max_position_embeddings", None) or LONGEST, max(8, room_of(worker) // 3))
    one, two, other, row = drawn(4, length, config.vocab_size)
    half = torch.cat((one[: length // 2], other[length // 2 :]))

    def found(*rows: torch.Tensor, training: bool = False) -> list[torch.Tensor]:
        halves, fused = [(row[:1], row[1:]) for row in rows], bool(worker.engine_config.use_fused_kernels)
        data = batch_of(halves, packed=packed, use_fused_kernels=fused)
        with engine.train_mode() if training else engine.eval_mode():
            out = engine.infer_batch(data)["model_output"]
        values = out.get("log_probs", out.get("values"))
        parts = [torch.zeros(length)] * len(rows) if values is None else values.unbind()
        return [part.float().cpu()[:-1] for part in parts]

    first, second, alone = found(one, two, row), found(half, other, row), found(row)
    trained = [found(one, two, row, training=True) for _ in range(2)] if engine.optimizer else [first, first]
    precise = getattr(engine, "_autocast_dtype", torch.bfloat16)
    fore = [part[0][: length // 2 - 1] for part in (first, second)]
    return Looked(
        rounding=apart(*fore), neighbour=apart(first[2], second[2]), place=apart(first[2], alone[0]),
        chance=apart(trained[0][2], trained[1][2]), training=apart(trained[0][2], first[2]),
        room=torch.finfo(precise).eps ** 0.5,
    )  # fmt: skip


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The mean difference of tokens; infinite if some are no numbers."""
    mean = float((one - other).abs().mean())
    return mean if mean == mean else torch.inf


def room_of(worker: TrainingWorker) -> int:
    """The tokens that a micro-batch may have."""
    engine = worker.engine_config
    return int(min(engine.infer_max_token_len_per_gpu or LONGEST * 3, engine.max_token_len_per_gpu or LONGEST * 3))


def drawn(count: int, length: int, vocabulary: int) -> torch.Tensor:
    """Rows of random tokens. Special ones stand at the ends of a vocabulary, and are left out."""
    pick = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary // 4, max(vocabulary // 2, vocabulary // 4 + 1), (count, length), generator=pick)
