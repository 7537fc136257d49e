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
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from ajet_sdk.sockets import watching
from ajet_trainer.attempts import Elsewhere

BACKEND = "ajet_folder"
POLL_S = 2.0
PUSH_S = 1800.0
"""A push that takes longer has failed, and with it the run."""


class EngineLost(Elsewhere):
    """An engine died or did not take the weights; the message says which one and what is known."""


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


def load_into(urls: Sequence[str], folder: Path, version: int, timeout_s: float = PUSH_S) -> None:
    """Has every engine reload its weights from `folder`, in place and between two tokens of what it generates. It also
    tells them their `version`, for an engine that says which weights sampled a token. All engines load at once.

    The folder must hold every tensor under each of its names, because vLLM reloads layer by layer. An output layer that
    is tied to the embedding keeps its old weights where the file leaves it out (measured with vLLM 0.31 on a CPU).
    Raises `EngineLost`. Each engine that was frozen is woken again in any case.
    """
    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        for loading in [pool.submit(_load, url, folder, version, timeout_s) for url in urls]:
            loading.result()


def _load(url: str, folder: Path, version: int, timeout_s: float) -> None:
    with asking(url, timeout_s) as engine:
        try:
            if not frozen(engine):
                ask(engine, "/pause?mode=keep")
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": timeout_s}
            ask(engine, "/collective_rpc", body)
            ask(engine, "/reset_prefix_cache")
        except httpx.HTTPError as error:
            with suppress(httpx.HTTPError):
                ask(engine, "/resume")
            raise EngineLost(f"the engine at {url} did not take the weights: {words(error)}") from error
        with suppress(httpx.HTTPError):
            ask(engine, "/update_weight_version", {"new_version": str(version)})
        try:
            ask(engine, "/resume")
        except httpx.HTTPError as error:
            raise EngineLost(f"the engine at {url} took the weights but does not continue: {words(error)}") from error


def asking(url: str, timeout_s: float) -> httpx.Client:
    """A client of the engine at `url`, which has `timeout_s` seconds for an answer."""
    limit, way = httpx.Timeout(30.0, read=timeout_s), httpx.HTTPTransport(verify=_trusted(), socket_options=watching())
    return httpx.Client(base_url=url, timeout=limit, trust_env=False, transport=way)


@cache
def _trusted() -> ssl.SSLContext:
    """Read once: reading the certificates takes as long as several requests, and agents wait for it."""
    return httpx.create_ssl_context(trust_env=False)


def frozen(engine: httpx.Client) -> bool:
    """Whether the engine is frozen, as the proxy's gate may have done: to freeze it again would take vLLM 20 ms."""
    with suppress(httpx.HTTPError, ValueError, KeyError):
        return engine.get("/is_paused").json()["is_paused"] is True
    return False


def forget(folder: Path, keep: int) -> None:
    """Removes the weights of every version but `keep` from `folder`."""
    for child in folder.iterdir():
        if child.is_dir() and child.name != str(keep):
            shutil.rmtree(child, ignore_errors=True)


def ask(engine: httpx.Client, path: str, body: dict[str, Any] | None = None) -> None:
    engine.post(path, json=body).raise_for_status()


def words(error: httpx.HTTPError, how: str = "start vLLM with VLLM_SERVER_DEV_MODE=1") -> str:
    """What went wrong; `how` an engine has the route, if it is missing."""
    if not isinstance(error, httpx.HTTPStatusError):
        return str(error) or type(error).__name__
    path, text = error.request.url.path, error.response.text
    if error.response.status_code == 404 and '"error"' not in text:
        return f"{path} is missing; {how}"
    return f"HTTP {error.response.status_code} from {path}: {text[:300]}"
