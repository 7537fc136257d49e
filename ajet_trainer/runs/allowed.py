"""The host's own file, which says what may run here when the wish comes from afar. No wish can say more.

::

    runs = "/srv/ajet/runs"                # the folder of run folders
    engines = ["http://127.0.0.1:8000"]    # what engine_urls may name
    [models]
    small = "/srv/models/small"            # what model may name
    [folders]
    weights = "/dev/shm/ajet"              # what weights_dir may name
    [verl]
    "trainer.n_gpus_per_node" = [1, 8]     # these values
    "actor_rollout_ref.rollout.gpu_memory_utilization" = true  # any number or word

A wish names models and folders by the words of this file, so no path comes from afar. It sets the trainer's own keys
but those of the host (`OF_THE_HOST`), and those of verl's keys that only turn a knob (`KNOBS`).

Invariant: no value of a wish reaches verl that is more than a number, a truth value or a plain word. Such a word names
no file, no function, no address, and nothing of the environment. Values that the file lists are the host's own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet_sdk.address import server
from ajet_sdk.runs import MIX
from ajet_sdk.settings import FILE, ConfigError, nearest, read_toml
from ajet_trainer.config import OF_THE_HOST, SETTINGS, Config, check, flatten
from ajet_trainer.mix import read_mix

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
OPTIMIZER = (
    "lr", "lr_scheduler_type", "lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio", "num_cycles",
    "weight_decay", "betas", "clip_grad",
)  # fmt: skip
KNOBS = frozenset((
    *(f"{part}.optim.{name}" for part in (ACTOR, CRITIC) for name in OPTIMIZER),
    *(f"{part}.{name}" for part in (ACTOR, CRITIC) for name in (
        "grad_clip", "loss_agg_mode", "ppo_epochs", "ppo_max_token_len_per_gpu", "ppo_mini_batch_size",
    )),
    *(f"{ACTOR}.{name}" for name in (
        "calculate_entropy", "clip_ratio", "clip_ratio_c", "clip_ratio_high", "clip_ratio_low", "entropy_coeff",
        "kl_loss_coef", "kl_loss_type", "policy_loss.loss_mode", "use_kl_loss",
    )),
    *(f"algorithm.{name}" for name in (
        "adv_estimator", "gamma", "kl_ctrl.horizon", "kl_ctrl.kl_coef", "kl_ctrl.target_kl", "kl_ctrl.type",
        "kl_penalty", "lam", "norm_adv_by_std_in_grpo", "rollout_correction.bypass_mode",
        "rollout_correction.rollout_is", "rollout_correction.rollout_is_threshold", "rollout_correction.rollout_rs",
        "rollout_correction.rollout_rs_threshold", "use_kl_in_reward",
    )),
    "actor_rollout_ref.model.lora_alpha", "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.rollout.temperature", "critic.cliprange_value", "trainer.critic_warmup",
))  # fmt: skip
"""verl's keys that anybody may set: how it learns, and nothing of where or with what."""
TABLES = ("models", "folders", "verl")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,99}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9][A-Za-z0-9._-]{0,99})?")


@dataclass(frozen=True, slots=True)
class Allowed:
    """The host's file. ``verl`` has for a key the values that it may have, or True for any plain ones."""

    runs: Path
    models: Mapping[str, str]
    folders: Mapping[str, str]
    engines: tuple[str, ...]
    verl: Mapping[str, Any]

    def document(self, run: str, keys: Mapping[str, Any], proxy: str) -> dict[str, dict[str, Any]]:
        """The trainer's file for the flat configuration `keys` of `run`. Raises `ConfigError`, whose `param` is the key
        at fault, for what may not run here."""
        ours = {"run_dir": str(self.runs / run), "proxy_url": proxy}
        theirs, lanes = {}, {}
        for key, value in keys.items():
            table, _, name = key.partition(".")
            if table == "trainer":
                ours[name] = self._ours(key, name, value)
            elif table == "verl":
                theirs[name] = self._theirs(key, name, value)
            elif table == MIX:
                lanes[name] = value
            else:
                raise ConfigError(f"{key}: this trainer has no table {table}", param=key)
        return {"trainer": ours, "verl": theirs} | ({MIX: lanes} if lanes else {})

    def _ours(self, key: str, name: str, value: Any) -> Any:
        if name in OF_THE_HOST:
            raise ConfigError(f"{key} is the host's to say, and cannot be set from afar", param=key)
        if name not in SETTINGS.options:
            raise ConfigError(f"unknown key {key!r}{nearest(name, SETTINGS.options)}", param=key)
        if name in ("model", "weights_dir"):
            known, kind = (self.models, "models") if name == "model" else (self.folders, "folders")
            if not isinstance(value, str) or value not in known:
                raise ConfigError(f"{key} must be one of {_names(known)}: {kind} of the host's file", param=key)
            return known[value]
        if name in ("engine_urls", "candidate_urls"):
            urls = value if isinstance(value, (list, tuple)) else [value]
            if not all(isinstance(url, str) and url.rstrip("/") in self.engines for url in urls):
                raise ConfigError(f"{key} must be of {_names(self.engines)}: engines of the host's file", param=key)
            return list(urls)
        if name in ("model_name", "candidate") and not (isinstance(value, str) and _MODEL_NAME.fullmatch(value)):
            raise ConfigError(f"{key} must have letters, digits and . _ - alone, and at most one /", param=key)
        return SETTINGS.options[name].read(value, key)

    def _theirs(self, key: str, name: str, value: Any) -> Any:
        allowed = self.verl.get(name, name in KNOBS)
        if allowed is False:
            near = nearest(name, (*KNOBS, *self.verl))
            said = "cannot be set from afar: the host can allow it under [verl] of its file"
            raise ConfigError(f"{key} {said}{near}", param=key)
        if allowed is True:
            if not all(map(_plain, value if isinstance(value, (list, tuple)) else [value])):
                raise ConfigError(f"{key} must be a number, true, false or a plain word, or a list of these", param=key)
        elif not any(type(one) is type(value) and one == value for one in allowed):
            raise ConfigError(f"{key} must be one of {json.dumps(allowed)}: values of the host's file", param=key)
        return value


def read(path: str) -> Allowed:
    """The host's file. Raises `ConfigError`."""
    found = read_toml(path)
    names = ("runs", "engines", *TABLES)
    for name, value in found.items():
        if name not in names:
            raise ConfigError(f"{path}: unknown key {name!r}{nearest(name, names)}", param=name)
        if name in TABLES and not isinstance(value, dict):
            raise ConfigError(f"{path}: {name} must be a table", param=name)
    runs, engines, verl = found.get("runs"), found.get("engines", []), dict(flatten(found.get("verl", {})))
    if not isinstance(runs, str) or not runs or "\0" in runs:
        raise ConfigError(f"{path}: runs is required: the folder of run folders", param="runs")
    if not isinstance(engines, list) or not all(isinstance(url, str) and server(url) is not None for url in engines):
        raise ConfigError(f"{path}: engines must be a list of http://HOST:PORT", param="engines")
    for table in ("models", "folders"):
        if not all(isinstance(value, str) for value in found.get(table, {}).values()):
            raise ConfigError(f"{path}: [{table}] must give a folder for each name", param=table)
    for key, values in verl.items():
        if values is not True and not isinstance(values, list):
            raise ConfigError(f"{path}: {key} in [verl] must be true, or a list of values", param="verl")
    return Allowed(
        Path(runs).expanduser().absolute(), found.get("models", {}), found.get("folders", {}),
        tuple(url.rstrip("/") for url in engines), verl,
    )


def config_of(document: Mapping[str, Mapping[str, Any]]) -> Config:
    """The configuration that `document` makes. Raises `ConfigError`."""
    ours = SETTINGS.read(document["trainer"], FILE, "trainer.")
    mix = read_mix(document[MIX], "") if MIX in document else ()
    return check(Config(**ours, mix=mix, verl=dict(document["verl"])))


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, str) and _WORD.fullmatch(value) is not None)


def _names(known: Any) -> str:
    return ", ".join(sorted(known)) or "none"
