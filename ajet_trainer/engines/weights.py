"""A whole model's weights on their way into engines that stand alone, through a folder that both see.

An engine takes them with nothing of ours inside it. It is told, by its own routes, to freeze, to reload from that
folder, to forget its prefix cache and to go on. It works with any tensor parallel size, over hosts with a shared file
system, and on a CPU. Every request has a time limit. The engine is told to go on whether or not the reload succeeded.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from ajet_trainer.engines import http
from ajet_trainer.engines.http import EngineLost, asking, frozen, words

LOOK_S = 2.0
PUSH_S = 1800.0
"""A push that takes longer has failed, and with it the run."""


def dead_engine(urls: Sequence[str]) -> str | None:
    """A sentence about the first engine whose ``/health`` says that it is gone; None while all may be well.

    A slow answer is no sign of death: an engine that loads weights may be too busy to answer.
    """
    for url in urls:
        try:
            with asking(url, LOOK_S) as engine:
                answer = engine.get("/health", timeout=LOOK_S)
        except httpx.TimeoutException:
            continue
        except httpx.TransportError as error:
            return f"the engine at {url} is gone ({error or type(error).__name__})"
        if answer.status_code >= 500:
            return f"the engine at {url} reports that it is dead (HTTP {answer.status_code})"
    return None


def load_into(urls: Sequence[str], folder: Path, version: int, timeout_s: float = PUSH_S, key: str = "") -> None:
    """Has every engine reload its weights from `folder`, in place and between two tokens of what it generates. It also
    tells them their `version`, for an engine that says which weights sampled a token. All engines load at once.

    The folder must hold every tensor under each of its names, because vLLM reloads layer by layer. An output layer that
    is tied to the embedding keeps its old weights where the file leaves it out (measured with vLLM 0.31 on a CPU).
    Raises `EngineLost`. Each engine that was frozen is woken again in any case.
    """
    http.each(urls, lambda url: _load(url, folder, version, timeout_s, key))


def _load(url: str, folder: Path, version: int, timeout_s: float, key: str) -> None:
    """An engine that the gate has frozen cannot forget what its calls use, and need not: calls that the proxy lets in
    later are salted. In any other nothing should be in flight, and it can forget at the latest once it is awake."""
    patience_s, begun = min(http.WAKE_S, timeout_s), False
    with asking(url, timeout_s, key) as engine:
        by_gate = frozen(engine)
        try:
            if not by_gate:
                http.ask(engine, "/pause?mode=keep")  # between two tokens
            begun = True
            how = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": timeout_s}
            http.ask(engine, "/collective_rpc", how)
            forgotten = http.forgets(engine, 0.0)
        except httpx.HTTPError as error:
            said = f"the engine at {url} did not take the weights: {words(error)}"
            half = f"; it may have taken a part of them: {http.START_AGAIN}" if begun else ""
            if asleep := http.wake(engine, patience_s):
                half = f"; nor does it continue ({asleep}): {http.START_AGAIN}"
            raise EngineLost(said + half) from error
        with suppress(httpx.HTTPError):  # an engine that knows no versions
            http.ask(engine, "/update_weight_version", {"new_version": str(version)})
        if asleep := http.wake(engine, patience_s):
            said = "took the weights but does not continue"
            raise EngineLost(f"the engine at {url} {said} ({asleep}): {http.START_AGAIN}")
        if not (forgotten or by_gate):
            _forget_awake(url, engine, patience_s)


def _forget_awake(url: str, engine: httpx.Client, patience_s: float) -> None:
    try:
        fault = "" if http.forgets(engine, patience_s) else "calls that the proxy does not hold are using it"
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
