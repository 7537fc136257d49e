"""Optimizer updates, counted where they are made; and the rates that they are made at.

verl leaves an update out if the gradient is not finite, says so in its log, and goes on. Here each engine tells in its
metrics whether it made the update (``updates``, 1 or 0). Its schedule goes on only after a step that made one. ``lr``
is the rate that was used, where verl tells the next one. A warm-up of N steps begins at 1/N of the rate, not at 0.

Invariant: an engine whose gradient is not finite has the weights that it had, or the step fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

SKIPS = ("fsdp", "fsdp2", "fsdp_turbo", "veomni", "torchtitan")
"""Engines of verl that leave out an update whose gradient is not finite. Others may make it."""


def counted(engine: Any) -> None:
    """Has verl's `engine` do what this module says."""
    initialize, train = engine.initialize, engine.train_batch
    step, schedule = engine.optimizer_step, engine.lr_scheduler_step
    made, since, rate = False, False, 0.0

    def prepared() -> None:
        initialize()
        if isinstance(found := getattr(engine, "lr_scheduler", None), LambdaLR):
            begin_above_0(found, warmup_of(engine.optimizer_config))

    def stepped() -> Any:
        nonlocal made, since, rate
        rate = rate_of(engine)
        norm = step()
        made = math.isfinite(norm)
        if not made and engine.engine_config.strategy not in SKIPS:
            raise FloatingPointError("the gradient is not finite, and the engine may have made an update of it")
        since = since or made
        return norm

    def trained(data: Any, loss_function: Any) -> Any:
        out = train(data, loss_function)
        while not made and may_shrink(engine):  # half precision: the loss was scaled too much, and is now scaled less
            out = train(data, loss_function)
        out.get("metrics", {})["updates"] = [float(made)]
        return out

    def scheduled() -> float:
        nonlocal since
        if since:
            schedule()
        since = False
        return rate

    engine.initialize, engine.train_batch = prepared, trained
    engine.optimizer_step, engine.lr_scheduler_step = stepped, scheduled


def may_shrink(engine: Any) -> bool:
    """True if the next gradient is of a loss that is scaled less."""
    scaler = getattr(engine, "scaler", None)
    return scaler is not None and scaler.get_scale() >= 1.0


def rate_of(engine: Any) -> float:
    """The rate of the next update."""
    schedule = getattr(engine.lr_scheduler, "schedulers", [engine.lr_scheduler])[0]
    last = getattr(schedule, "get_last_lr", None)
    return float(last()[0] if last else engine.optimizer.param_groups[0]["lr"])


def warmup_of(optim: Any) -> int:
    """The steps of the warm-up of verl's options `optim`."""
    steps = optim.lr_warmup_steps or 0
    return steps if steps > 0 else int(optim.lr_warmup_steps_ratio * optim.total_training_steps)


def begin_above_0(schedule: LambdaLR, warmup: int) -> None:
    """Has step k of the `warmup`, from 0, take the rate of k + 1, where `schedule` begins at 0."""

    def shifted(of: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: of(step + 1) if step < warmup and of(0) == 0 else of(step)

    schedule.lr_lambdas = [shifted(of) for of in schedule.lr_lambdas]
    over_rate(schedule, schedule.base_lrs[0])


def over_rate(schedule: LambdaLR, rate: float) -> None:
    """Has `schedule`, and its optimizer, go on over another `rate`."""
    groups = schedule.optimizer.param_groups
    schedule.base_lrs = [rate] * len(groups)
    schedule._last_lr = [rate * part(schedule.last_epoch) for part in schedule.lr_lambdas]
    for group, now in zip(groups, schedule._last_lr, strict=True):
        group["initial_lr"], group["lr"] = rate, now


@contextmanager
def own_options(schedule: Any) -> Iterator[None]:
    """The optimizer of `schedule` has afterwards the options that it was made with. A checkpoint that is loaded inside
    brings those along that it was made under."""
    if not isinstance(schedule, LambdaLR):
        yield
        return
    made = [{name: value for name, value in one.items() if name != "params"} for one in schedule.optimizer.param_groups]
    yield
    for group, options in zip(schedule.optimizer.param_groups, made, strict=True):
        group.update(options)
    over_rate(schedule, made[0]["initial_lr"])


def over_top(schedule: Any, rate: float) -> None:
    """The same for the schedule of Megatron, which knows the highest rate."""
    schedule.max_lr = rate
    for group in schedule.optimizer.param_groups:
        if "max_lr" in group:
            group["max_lr"] = rate
    schedule.step(0)
