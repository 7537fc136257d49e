"""Weights from the trainer to the engine, and the watchdog over their way.

*Hybrid*: verl streams them from each training process to the vLLM worker on the same device (CUDA IPC, or shared memory
on a CPU). That sender waits for its receiver without a limit, so `wait` sets one. A push that takes too long, or whose
engine died, ends in an `EngineLost` that says so.

*Attached*: an engine that stands alone takes weights with nothing of ours inside it. Training process 0 writes them as
safetensors into a folder that both see (shared memory by default). Each engine is told, by its own routes
(``VLLM_SERVER_DEV_MODE=1``), to freeze, to reload from that folder, to forget its prefix cache and to go on. It works
with any tensor parallel size, over hosts with a shared file system, and on a CPU; every request has a time limit. The
engine is told to go on whether or not the reload succeeded.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from ajet_trainer import engines
from ajet_trainer.engines import EngineLost, asking, frozen, words

BACKEND = "ajet_folder"
POLL_S = 2.0
PUSH_S = 1800.0
"""A push that takes longer has failed, and with it the run."""


def wait(references: Sequence[Any], alive: Callable[[], str | None], timeout_s: float = PUSH_S) -> None:
    """Waits for Ray `references`. `alive` is asked every few seconds and names what died, if anything did.

    Raises `EngineLost` after `timeout_s` seconds, or as soon as something died.
    """
    give_up = time.monotonic() + timeout_s
    pending = list(references)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise EngineLost(f"the weight push failed: {type(cause).__name__}: {str(cause).strip()}") from error
        if not pending:
            return
        dead = alive()
        if dead is not None:
            raise EngineLost(f"the weight push cannot finish: {dead}")
        if time.monotonic() > give_up:
            raise EngineLost(f"the weight push did not finish within {timeout_s:g} s")


def dead_engine(urls: Sequence[str]) -> str | None:
    """A sentence about the first engine whose ``/health`` says that it is gone; None while all may be well.

    A slow answer is no sign of death: an engine that loads weights may be too busy to answer.
    """
    for url in urls:
        try:
            answer = httpx.get(f"{url}/health", timeout=POLL_S, trust_env=False)
        except httpx.TimeoutException:
            continue
        except httpx.TransportError as error:
            return f"the engine at {url} is gone ({error or type(error).__name__})"
        if answer.status_code >= 500:
            return f"the engine at {url} reports that it is dead (HTTP {answer.status_code})"
    return None


@CheckpointEngineRegistry.register(BACKEND)
class SharedFolder:
    """verl's checkpoint engine for the attached placement: process 0 writes the tensors, every process gathers them.

    This is its sending half alone, since an engine that stands alone receives by itself.
    """

    def __init__(self, bucket_size: int, is_master: bool, folder: str) -> None:
        self._is_master = is_master
        self._folder = Path(folder)

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Writes ``FOLDER/GLOBAL_STEPS/model.safetensors``; gathering is collective, so every process iterates."""
        from safetensors.torch import save_file

        tensors = {}
        for name, tensor in weights:
            if self._is_master:
                tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()  # tied weights must not share memory
        if self._is_master:
            target = self._folder / str(global_steps)
            target.mkdir(parents=True, exist_ok=True)
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def load_into(urls: Sequence[str], folder: Path, version: int, timeout_s: float = PUSH_S, key: str = "") -> None:
    """Has every engine reload its weights from `folder`, in place and between two tokens of what it generates. It also
    tells them their `version`, for an engine that says which weights sampled a token. All engines load at once.

    The folder must hold every tensor under each of its names, because vLLM reloads layer by layer. An output layer that
    is tied to the embedding keeps its old weights where the file leaves it out (measured with vLLM 0.31 on a CPU).
    Raises `EngineLost`. Each engine that was frozen is woken again in any case.
    """
    engines.each(urls, lambda url: _load(url, folder, version, timeout_s, key))


def _load(url: str, folder: Path, version: int, timeout_s: float, key: str) -> None:
    """An engine that the gate has frozen cannot forget what its calls use, and need not: calls that the proxy lets in
    later are salted. In any other nothing should be in flight, and it can forget at the latest once it is awake."""
    patience_s, begun = min(engines.WAKE_S, timeout_s), False
    with asking(url, timeout_s, key) as engine:
        by_gate = frozen(engine)
        try:
            if not by_gate:
                engines.ask(engine, "/pause?mode=keep")
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": timeout_s}
            begun = True
            engines.ask(engine, "/collective_rpc", body)
            forgotten = engines.forgets(engine, 0.0)
        except httpx.HTTPError as error:
            said = f"the engine at {url} did not take the weights: {words(error)}"
            half = f"; it may have taken a part of them: {engines.START_AGAIN}" if begun else ""
            if asleep := engines.wake(engine, patience_s):
                half = f"; nor does it continue ({asleep}): {engines.START_AGAIN}"
            raise EngineLost(said + half) from error
        with suppress(httpx.HTTPError):  # an engine that knows no versions
            engines.ask(engine, "/update_weight_version", {"new_version": str(version)})
        if asleep := engines.wake(engine, patience_s):
            said = "took the weights but does not continue"
            raise EngineLost(f"the engine at {url} {said} ({asleep}): {engines.START_AGAIN}")
        if not (forgotten or by_gate):
            _forget_awake(url, engine, patience_s)


def _forget_awake(url: str, engine: httpx.Client, patience_s: float) -> None:
    try:
        fault = "" if engines.forgets(engine, patience_s) else "calls that the proxy does not hold are using it"
    except httpx.HTTPError as error:
        fault = words(error)
    if fault:
        said = "took the weights but keeps what the old ones computed"
        raise EngineLost(f"the engine at {url} {said}, since its prefix cache could not be reset: {fault}")


def forget(folder: Path, keep: int) -> None:
    """Removes the weights of every version but `keep` from `folder`."""
    for child in folder.iterdir():
        if child.is_dir() and child.name != str(keep):
            shutil.rmtree(child, ignore_errors=True)
