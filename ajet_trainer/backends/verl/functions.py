"""An estimator or a loss of the user's own, named in the configuration as ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``.

It is imported before Ray starts, and registered with verl under the words that name it. Workers, which compute losses,
import it again by the same words. So a file is named by its absolute path, and must lie there on every host.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo import core_algos

from ajet_sdk.settings import ConfigError

ESTIMATOR, LOSS = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    ESTIMATOR: ("token_level_rewards", "response_mask", "config", "index"),
    LOSS: (
        "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights",
    ),
}  # fmt: skip
"""The arguments that verl gives to a function of each kind, by name."""


def register_all(tree: DictConfig) -> None:
    """Registers the functions that `tree` names, and puts absolute paths into it. Raises `ConfigError`."""
    for key in ARGUMENTS:
        said = OmegaConf.select(tree, key)
        if isinstance(said, str) and ":" in said:
            OmegaConf.update(tree, key, absolute(said))
            register(key, absolute(said))


def absolute(name: str) -> str:
    """`name` with the absolute path of its file, if it names one."""
    place, _, function = name.rpartition(":")
    return f"{Path(place).absolute()}:{function}" if place.endswith(".py") else name


def register(key: str, name: str) -> None:
    """Has verl know the function under `name`, which is what `key` says; a second call does nothing."""
    known: dict[str, Any] = core_algos.ADV_ESTIMATOR_REGISTRY if key == ESTIMATOR else core_algos.POLICY_LOSS_REGISTRY
    if ":" in name and name not in known:
        known[name] = load(key, name)


def load(key: str, name: str) -> Callable[..., Any]:
    """The function `name`, which takes what verl gives it."""
    place, _, called = name.rpartition(":")
    try:
        found = getattr(_module(place), called, None)
    except Exception as error:  # it is the user's code, which may fail in any way
        raise ConfigError(f"{key}: {place} cannot be imported: {type(error).__name__}: {error}", param=key) from error
    if not inspect.isfunction(found):
        raise ConfigError(f"{key}: {place} has no function {called!r}", param=key)
    try:
        inspect.signature(found).bind(**dict.fromkeys(ARGUMENTS[key]))
    except TypeError as error:
        given = ", ".join(ARGUMENTS[key])
        raise ConfigError(f"{key}: {called} cannot be called as verl does, with {given}: {error}", param=key) from error
    return found


def _module(place: str) -> ModuleType:
    """The module at `place`, which is a file or a name."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    name = f"ajet_own_{place.replace('/', '_')}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
