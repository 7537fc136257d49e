"""The engines that stand alone: how the weights of a version reach them, and what becomes of them in between.

A backend writes the weights of a version into a folder. The rest is here: engines load them, and forget what older ones
computed. One that was started again is given the last ones. One that died or serves another model ends the run.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from ajet_sdk.settings import ConfigError
from ajet_trainer.config import Config
from ajet_trainer.engines import EngineLost, adapters, same_model, weights
from ajet_trainer.engines.vllm import ANSWER_S, Vllm, words


class Attached:
    """The engines of `config`, which are sent weights through `folder`; of an adapter `apart`, that alone.

    `permit` raises if they may have no more of our weights. `say` shows a line. `candidate` are the engines of the
    candidate, which may be the same ones under its name.
    """

    def __init__(
        self, config: Config, folder: Path, *, apart: bool = False,
        permit: Callable[[], None] = lambda: None, say: Callable[[str], None] = lambda line: None,
        candidate: Attached | None = None,
    ) -> None:
        self.urls, self.folder, self.apart, self.candidate = config.engine_urls, folder, apart, candidate
        self._config, self._key, self._permit, self._say = config, config.engine_key, permit, say
        self._adapter: Path | None = None
        self._pushed: tuple[Path, int] | None = None
        self._seen: dict[str, same_model.Served] = {}

    def push(self, version: int, write: Callable[[Path], None]) -> bool:
        """Has the engines serve `version`, which `write` puts into the folder that it is given. True if an engine was
        started again since the last push. Raises `EngineLost`."""
        again = self._started_again()
        if self.apart:
            written = adapters.begin(self.folder, version)
            write(written)
            self._adapter = adapters.finish(written)
            self._permit()
            adapters.load_into(self.urls, self._config.model_name, self._adapter, key=self._key)
            adapters.forget(self._adapter)
        else:
            folder = self.folder / str(version)
            write(folder)
            self._permit()
            weights.load_into(self.urls, folder, version, key=self._key)
            weights.forget(self.folder, version)
            self._pushed = folder, version
            self._seen |= same_model.look(self._config, self._seen)
        return bool(again)

    def check(self) -> bool:
        """Gives engines that were started again what they had. True if that were whole weights, which are worth a
        comparison. Raises `EngineLost` for an engine that died, or serves another model."""
        if dead := weights.dead_engine(self.urls):
            raise EngineLost(dead)
        again = self._started_again()
        if given := bool(again and self._pushed is not None):
            self._give_again(again)
        if self._adapter is not None:
            for url in adapters.heal(self.urls, self._config.model_name, self._adapter, self._key):
                self._say(f"the engine at {url} had lost its adapter, and has it again")
        return given

    def longest(self, bound: int) -> int:
        """The tokens of the longest row that engines serve, which must be all above `bound`, or all up to it. Raises
        `ConfigError`, and `EngineLost`."""
        limits = {url: self._longest_of(url) for url in self.urls}
        if len({limit > bound for limit in limits.values()}) > 1:
            said = f"serve rows of up to {limits}, on both sides of {bound}, where positions change"
            raise ConfigError(f"engine_urls {said}: start them with one --max-model-len", param="engine_urls")
        return max(limits.values())

    def dtype(self) -> str | None:
        """The dtype in which all engines hold and compute the model, as ``bfloat16``; None where one tells none, or
        another than the others, or quantizes."""
        found = set()
        for url in self.urls:
            with Vllm(url, ANSWER_S, self._key) as engine:
                found.add(engine.dtype())
        return found.pop() if len(found) == 1 else None

    def _longest_of(self, url: str) -> int:
        with Vllm(url, ANSWER_S, self._key) as engine:
            try:
                return max(int(length) for _, _, length in engine.own_models() if length)
            except (httpx.HTTPError, ValueError, TypeError) as error:
                said = f"does not say how long rows may be: {words(error)}"
                raise EngineLost(f"the engine at {url} {said}") from error

    def _started_again(self) -> list[str]:
        """The engines that were started again since they were last given weights, which have those that they began
        with."""
        found = same_model.look(self._config, self._seen)
        again = [url for url, now in found.items() if same_model.started_again(self._seen.get(url), now)]
        self._seen |= found
        return again

    def _give_again(self, urls: Sequence[str]) -> None:
        assert self._pushed is not None
        folder, version = self._pushed
        self._permit()
        weights.load_into(urls, folder, version, key=self._key)
        self._seen |= same_model.look(self._config, self._seen)
        self._say(f"{' and '.join(urls)} had been started again, and has the weights again")


@contextmanager
def attached(config: Config, permit: Callable[[], None], say: Callable[[str], None]) -> Iterator[Attached | None]:
    """The engines of `config` that stand alone; None if the backend launches its own."""
    if not config.attached:
        yield None
        return
    apart, candidate = adapters.apart(config), None
    with weights_folder(config, apart=apart) as folder:
        if config.candidate:
            its = of_candidate(config)
            if adapters.apart(its) is not apart:
                said = f"an adapter of {' and '.join(its.engine_urls)}, and {config.model_name!r} is a model of its own"
                other = f"a model of its own, and {config.model_name!r} an adapter"
                raise ConfigError(f"candidate: {config.candidate!r} is {other if apart else said}", param="candidate")
            place = folder.with_name(f"{folder.name}-next") if apart else folder / "next"
            place.mkdir(exist_ok=True)
            candidate = Attached(its, place, apart=apart, permit=permit, say=say)
        yield Attached(config, folder, apart=apart, permit=permit, say=say, candidate=candidate)


def of_candidate(config: Config) -> Config:
    """`config` with the candidate's name and engines in place of those of the model that serves."""
    urls = config.candidate_urls or config.engine_urls
    return replace(config, model_name=config.candidate, engine_urls=urls, candidate="")


def weights_parent(config: Config) -> Path:
    """The folder in which that of the weights is made: `weights_dir`, else the host's memory."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return Path(config.weights_dir or shared).absolute()


@contextmanager
def weights_folder(config: Config, *, apart: bool = False) -> Iterator[Path]:
    """The folder in which weights travel. It is this run's own and is removed with it. What a killed run left goes with
    the next. But that of an adapter `apart` stays, because engines may read it again."""
    parent = weights_parent(config)
    run = f"{platform.node()}:{Path(config.run_dir).absolute()}"
    word = hashlib.sha256(run.encode()).hexdigest()[:16]
    if apart:
        own = Path(config.run_dir).absolute() / "adapters"
        folder = parent / f"ajet-adapters-{word}" if config.weights_dir else own
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    name = f"ajet-weights-{word}"
    for left in parent.glob(f"{name}*"):
        shutil.rmtree(left, ignore_errors=True)
    if config.weights_dir:
        folder = parent / name
        folder.mkdir(parents=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
