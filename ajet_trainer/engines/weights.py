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

from ajet_trainer.engines import EngineLost, each, vllm
from ajet_trainer.engines.vllm import Vllm, words

PUSH_S = 1800.0
"""A push that takes longer has failed, and with it the run."""
START_AGAIN = "start it again"


def dead_engine(urls: Sequence[str]) -> str | None:
    """A sentence about the first engine that is dead; None while all may be well."""
    for url in urls:
        with Vllm(url, vllm.ANSWER_S) as engine:
            if how := engine.dead():
                return f"the engine at {url} {how}"
    return None


def load_into(urls: Sequence[str], folder: Path, version: int, timeout_s: float = PUSH_S, key: str = "") -> None:
    """Has every engine reload its weights from `folder`, in place and between two tokens of what it generates. It also
    tells them their `version`, for an engine that says which weights sampled a token. All engines load at once.

    The folder must hold every tensor under each of its names, because vLLM reloads layer by layer. An output layer that
    is tied to the embedding keeps its old weights where the file leaves it out (measured with vLLM 0.31 on a CPU).
    Raises `EngineLost`. Each engine that was frozen is woken again in any case.
    """
    each(urls, lambda url: _load(url, folder, version, timeout_s, key))


def _load(url: str, folder: Path, version: int, timeout_s: float, key: str) -> None:
    """An engine that the gate has frozen cannot forget what its calls use, and need not: calls that the proxy lets in
    later are salted. In any other nothing should be in flight, and it can forget at the latest once it is awake."""
    patience_s, begun = min(vllm.WAKE_S, timeout_s), False
    with Vllm(url, timeout_s, key) as engine:
        by_gate = engine.frozen()
        try:
            if not by_gate:
                engine.freeze()
            begun = True
            engine.reload(folder, timeout_s)
            forgotten = engine.forgets(0.0)
        except httpx.HTTPError as error:
            said = f"the engine at {url} did not take the weights: {words(error)}"
            half = f"; it may have taken a part of them: {START_AGAIN}" if begun else ""
            if asleep := engine.wake(patience_s):
                half = f"; nor does it continue ({asleep}): {START_AGAIN}"
            raise EngineLost(said + half) from error
        with suppress(httpx.HTTPError):  # an engine that knows no versions
            engine.name_version(version)
        if asleep := engine.wake(patience_s):
            said = "took the weights but does not continue"
            raise EngineLost(f"the engine at {url} {said} ({asleep}): {START_AGAIN}")
        if not (forgotten or by_gate):
            _forget_awake(url, engine, patience_s)


def _forget_awake(url: str, engine: Vllm, patience_s: float) -> None:
    try:
        fault = "" if engine.forgets(patience_s) else "calls that the proxy does not hold are using it"
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
