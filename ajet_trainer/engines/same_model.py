"""Makes sure, before each push, that engines which stand alone serve the model that is trained, by what they say.

Weights of another model may fit by name and size, and the engine would answer nonsense from then on. So its names, its
context, and the configuration in its folder if this host has that, are compared with the folder of `model` before the
first push. From then on it must tell the same. An engine may also be started again with the right model, and serves the
weights that it began with: then it does not know their version any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from ajet_trainer.config import NAME, Config, check
from ajet_trainer.engines import EngineLost, vllm
from ajet_trainer.engines.vllm import NO_VERSION, Vllm, words

LOOK_S = 30.0
UNREADABLE = (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError)
SHAPE = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size",
)  # fmt: skip
"""The keys that are alike in two configurations of one model."""


class Served(NamedTuple):
    """An engine's own models, as it tells them: name, folder and longest context of each. And the version of its
    weights, if it tells one."""

    models: tuple[tuple[str, str, int | None], ...]
    version: str | None = None


def as_served(config: Config, say: Callable[[str], None]) -> Config:
    """`config` with the name of the only model that its engines serve, where it names none itself. A line says so. An
    adapter has a name of its own. Raises `ConfigError` for a name that cannot be."""
    names = set[tuple[str, ...]]()
    if config.model_name != NAME or config.adapts:
        return config
    for url in config.engine_urls:
        with suppress(*UNREADABLE), Vllm(url, vllm.ANSWER_S, config.engine_key) as engine:
            names.add(tuple(name for name, _, _ in engine.own_models()))
    if len(names) != 1 or len(only := next(iter(names))) != 1 or only[0] == NAME:
        return config
    say(f"model_name = {only[0]!r}: the engine serves it alone, and the configuration names none")
    return check(replace(config, model_name=only[0]))


def shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a model's configuration that tells it from others; of one that also sees, of its text."""
    whole = {**config, **(config.get("text_config") or {})}
    return {name: whole[name] for name in SHAPE if whole.get(name) is not None}


def context(config: Mapping[str, Any]) -> float | None:
    """The longest context that a model can have, in tokens."""
    whole = {**config, **(config.get("text_config") or {})}
    scaling = whole.get("rope_scaling") or whole.get("rope_parameters") or {}
    length, factor = whole.get("max_position_embeddings"), scaling.get("factor") if isinstance(scaling, Mapping) else 1
    return None if not isinstance(length, int) else length * max(1.0, float(factor or 1))


def config_of(folder: str | Path) -> Mapping[str, Any]:
    """The configuration in a model's folder, if this host has it; else nothing."""
    with suppress(OSError, ValueError):
        found = json.loads((Path(folder) / "config.json").read_text())
        return found if isinstance(found, dict) else {}
    return {}


def fault(wanted: Config, own: Mapping[str, Any], says: Served, its: Mapping[str, Any]) -> str | None:
    """The reason why an engine that `says` so of itself is none of the model `wanted`. Its configuration is `own`, and
    `its` is the engine's, as far as known."""
    names = [name for name, _, _ in says.models]
    if wanted.model_name not in names and not wanted.adapts:
        return f"serves no model by the name {wanted.model_name!r} (model_name), but {', '.join(names) or 'none'}"
    ours, theirs = shape(own), shape(its)
    for name in ours.keys() & theirs.keys():
        if ours[name] != theirs[name]:
            return f"serves another model: its {name} is {theirs[name]}, and that of {wanted.model} is {ours[name]}"
    longest = context(own)
    for name, root, length in says.models:
        if longest is not None and length is not None and length > longest and not its:
            said = f"serves another model: {name} ({root}) has a context of {length} tokens"
            return f"{said}, and {wanted.model} has {longest:g}"
    return None


def look(config: Config, before: Mapping[str, Served]) -> dict[str, Served]:
    """Asks each engine of `config` what it serves. Raises `EngineLost` for one that serves another model than `before`,
    or, if it was not looked at before, than that of `config`. One that does not answer is left out."""
    own, found = config_of(config.model), dict[str, Served]()
    for url in config.engine_urls:
        with Vllm(url, LOOK_S, config.engine_key) as engine:
            try:
                says = found[url] = Served(engine.own_models(), engine.version())
            except (httpx.TransportError, ValueError, LookupError, TypeError, AttributeError):
                continue
            except httpx.HTTPError as error:
                raise EngineLost(f"the engine at {url} does not say what it serves: {words(error)}") from error
            said = None
            if url not in before:
                roots = (config_of(root) for _, root, _ in says.models)
                said = fault(config, own, says, next(filter(None, roots), {}))
                if said is None and config.model_name in (name for name, _, _ in says.models):
                    with suppress(httpx.TransportError):  # one that has gone meanwhile is found by the next look
                        if not engine.takes_weights():
                            raise EngineLost(f"the engine at {url} takes no weights: {vllm.DEV_MODE}")
            elif says.models != before[url].models:
                said = f"was started again with another model: it serves {named(says)}, and served {named(before[url])}"
        if said is not None:
            remedy = "It was sent nothing: start it with the model that is trained"
            raise EngineLost(f"the engine at {url} {said}. {remedy}")
    return found


def named(says: Served) -> str:
    return ", ".join(f"{name} from {root} with {length} tokens" for name, root, length in says.models) or "nothing"


def started_again(before: Served | None, now: Served) -> bool:
    """True if an engine has forgotten the version of its weights."""
    return before is not None and before.version not in (None, NO_VERSION) and now.version == NO_VERSION
