"""An adapter alone, to engines that hold several: two models of a team may be two LoRA adapters of one vLLM.

vLLM takes an adapter under a name while it serves others. So a push changes what answers to this one name: the engine
is not frozen, its prefix cache stays, and it is told no version of its weights. Who teaches what is seen by the names:
a run with an adapter whose ``model_name`` is none of the engine's own models teaches the adapter of that name.

- Each push is in a folder of its own, which appears whole. vLLM tells by name and folder what it has computed with an
  adapter, so nothing that an old one left in the prefix cache is used for a new one.
- vLLM reads an adapter again when its place was needed for another. If its folder were gone then, the engine would end
  with all its models (0.31). So folders outlive the run.
- The old one is unloaded before the new one is loaded. Loaded in its place (``load_inplace``), it would be read again
  before each token, and calls in flight would bring the old one back. As it is, they go on with the old one. So a
  draining gate must have waited for them, and an engine that is frozen is an error.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import httpx

from ajet_sdk.settings import ConfigError
from ajet_trainer.config import Config, flatten
from ajet_trainer.engines import EngineLost, each, vllm
from ajet_trainer.engines.vllm import Vllm, words
from ajet_trainer.engines.weights import PUSH_S

RANK = "actor_rollout_ref.model.lora_rank"
LOOK_S = 30.0


def apart(config: Config) -> bool:
    """True if the engines of `config` are sent its adapter alone. Raises `ConfigError` if they take none, and
    `EngineLost` if one does not answer."""
    rank = {key.lstrip("+"): value for key, value in flatten(config.verl)}.get(RANK)
    if not config.attached or not isinstance(rank, int) or rank < 1:
        return False
    found = {url: _takes(url, config.model_name, config.engine_key) for url in config.engine_urls}
    if len(set(found.values())) > 1:
        own = next(url for url, takes in found.items() if not takes)
        said = f"{config.model_name!r} is the model of {own} itself, and an adapter of the others"
        raise ConfigError(f"engine_urls: {said}", param="engine_urls")
    return all(found.values())


def _takes(url: str, name: str, key: str) -> bool:
    """True if the engine takes an adapter `name`; False where this is the name of a model of its own."""
    with Vllm(url, LOOK_S, key) as engine:
        try:
            own = [model for model, _, _ in engine.own_models()]
            if name in own:
                return False
            takes = engine.takes_adapters()
        except httpx.HTTPError as error:
            raise EngineLost(f"the engine at {url} does not say what it serves: {words(error)}") from error
    if not takes:
        said = f"no model of the engine at {url}, which serves {', '.join(map(repr, own))}, and it takes no adapter of"
        raise ConfigError(f"model_name = {name!r} is {said} that name: {vllm.ADAPTERS}", param="model_name")
    return True


def begin(home: Path, version: int) -> Path:
    """The folder into which the adapter of `version` is written. `finish` makes it whole."""
    return home / f"{version}-{uuid.uuid4().hex[:12]}.unfinished"


def finish(written: Path) -> Path:
    """The folder of an adapter that is whole."""
    folder = written.with_suffix("")
    os.replace(written, folder)
    return folder


def forget(folder: Path) -> None:
    """Removes the adapters before that in `folder`, and what killed runs did not finish. The last one before it stays:
    a call that went around the gate may still use it."""
    others = sorted(set(folder.parent.iterdir()) - {folder}, key=lambda one: one.stat().st_mtime_ns)
    whole = [one for one in others if not one.suffix]
    for old in (*whole[:-1], *(one for one in others if one.suffix)):
        shutil.rmtree(old, ignore_errors=True)


def load_into(urls: Sequence[str], name: str, folder: Path, timeout_s: float = PUSH_S, key: str = "") -> None:
    """Has every engine answer to `name` with the adapter in `folder`, all at once. Raises `EngineLost`; an engine that
    did not take it answers as before, or the message says that it cannot."""
    each(urls, lambda url: _load(url, name, folder, timeout_s, key))


def _load(url: str, name: str, folder: Path, timeout_s: float, key: str) -> None:
    with Vllm(url, timeout_s, key) as engine:
        if engine.frozen():
            said = "is frozen, and its calls would go on with the old adapter: serve with gate_mode = drain"
            raise EngineLost(f"the engine at {url} {said}")
        before = None
        try:
            before = engine.folder_of(name)
            if before is not None:
                engine.unload_adapter(name)
            engine.load_adapter(name, str(folder))
        except httpx.HTTPError as error:
            said = f"the engine at {url} did not take the adapter: {words(error)}"
            if before is not None and (lacks := _give_back(engine, name, before, min(vllm.WAKE_S, timeout_s))):
                said += f"; nor has it the old one again ({lacks}): the next start of the trainer gives it one"
            raise EngineLost(said) from error


def _give_back(engine: Vllm, name: str, folder: str, patience_s: float) -> str:
    """Has the engine answer to `name` with the adapter in `folder` again. Returns what is wrong if it does not."""

    def given() -> str:
        if engine.folder_of(name) is None:
            engine.load_adapter(name, folder)
        return ""

    return vllm.again(given, patience_s)


def heal(urls: Sequence[str], name: str, folder: Path, key: str = "") -> list[str]:
    """The engines that had lost the adapter, because they were started again. They have it now. Raises `EngineLost`."""
    healed = []
    for url in urls:
        with Vllm(url, LOOK_S, key) as engine:
            try:
                lost = engine.folder_of(name) != str(folder)
            except httpx.HTTPError:
                continue  # `weights.dead_engine` tells what has died
        if lost:
            _load(url, name, folder, PUSH_S, key)
            healed.append(url)
    return healed
