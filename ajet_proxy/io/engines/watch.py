"""A watch on whether each engine still serves what it was last given, and goes on: looked at every few seconds.

An engine may be started again while daemon and trainer run, with another model, or with the weights that it began with.
It answers as before. Its calls are lost as soon as that is seen, because the trained model has not sampled them. And a
trainer that dies in a push may leave an engine frozen behind an open gate: agents would wait for ever. Both raise an
alert, which ends when the engine is right again.

What an engine says of its model is noted whenever a gate opens or engines are announced, because their
trainer has just looked itself. If it does not answer then, the note before it stands: what answers next may be another
engine than its trainer saw. Notes are kept in the data directory, for `doctor` and the next start. Where no trainer
speaks, an engine may serve what it likes.

An engine that failed, or did not answer, may come back as another process between two looks. So it is looked at before
the next of its calls counts (`settle`).

An engine that is frozen is no fault until it is found so twice while no gate is shut that may freeze it. It is not
woken from here: a trainer that this daemon does not hear may be loading weights, and half of them would end the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ajet_proxy.io.engines.engine import EngineState
from ajet_proxy.io.engines.upstream import Engines, as_asked
from ajet_proxy.io.engines.vllm import NO_VERSION, over, session

logger = logging.getLogger(__name__)

LOOK_S, SOON_S = 15.0, 0.5
"""Between two looks, and until one after the trainer has spoken."""
ANSWER_S = 5.0
FILE = "engines.json"
Noted = Mapping[str, Any]
"""An engine's word on itself: `models` with its own ones, and the `version` of its weights, if it tells one."""


def words(models: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{name} from {root} with {length} tokens" for name, root, length in models)


def changed(before: Noted, now: Noted) -> str | None:
    """Name the change at an engine that should not have come."""
    was, serves = before.get("models"), now.get("models")
    if was and serves and was != serves:
        return f"serves {words(serves)}, where it served {words(was)} when it was last given weights"
    if now.get("version") == NO_VERSION and before.get("version") not in (None, NO_VERSION):
        return f"was started again, and serves the weights that it began with, not version {before['version']}"
    return None


def read(data_dir: Path) -> dict[str, Noted]:
    """Read what engines said of themselves when it was last noted, by base URL."""
    try:
        found = json.loads((data_dir / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {url: noted for url, noted in found.items() if isinstance(noted, dict)} if isinstance(found, dict) else {}


class EngineWatch:
    """Looks at `engines`, with their `key`, and keeps `alerts` by subject. `shut` tells which gates are."""

    def __init__(
        self, engines: Engines, alerts: MutableMapping[str, str], *, shut: Callable[[], Iterable[str]],
        data_dir: Path, key: str | None = None,
    ) -> None:
        self._engines, self._alerts, self._shut, self._data_dir = engines, alerts, shut, data_dir
        self._key = key
        self._spoken = asyncio.Event()
        self._noted = read(data_dir)
        self._due: set[str] = set()
        self._frozen: set[str] = set()
        self._others: set[str] = set()
        """The base URLs of engines that serve what no trainer has given them."""
        self._doubted: set[str] = set()
        self._settling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def serves_other(self, route: str) -> bool:
        """Tell whether the engine that has `route` serves what no trainer has given it."""
        return any(route.startswith(f"{url}/") for url in self._others)

    def doubt(self) -> None:
        """A call failed at an engine: each may be another process by now."""
        self._doubted.update(self._noted)

    async def settle(self, route: str) -> None:
        """Looks at the engine that has `route`, if it may be another process than when it was last looked at. Nobody
        waits for a look at another engine."""
        for url in [url for url in self._noted if url in self._doubted or self._settling[url].locked()]:
            if route.startswith(f"{as_asked(url)}/"):
                async with self._settling[url]:
                    if url in self._doubted:
                        await self._settle(url)

    async def _settle(self, url: str) -> None:
        self._doubted.discard(url)  # who doubts it from here on wants another look
        try:
            [told] = await self._probe([url])
        except asyncio.CancelledError:
            self._doubted.add(url)
            raise
        self._judge(url, told)

    def spoken(self, model: str) -> None:
        """Take as right what the engines of `model` say from now on, since its trainer has looked. "" is any model."""
        urls = self._engines.of(model) if model else self._engines.all()
        self._due.update(urls)
        self._others.difference_update(map(as_asked, urls))
        self._spoken.set()

    async def run(self) -> None:
        """Looks until it is cancelled, and first says whether engines answer."""
        with suppress(Exception):  # an odd answer is for the looks to log
            await self.greet()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._spoken.wait()
                await asyncio.sleep(SOON_S)
            self._spoken.clear()
            try:
                await self.look()
            except Exception:  # an odd answer is no reason to look no more
                logger.exception("engines could not be looked at")

    async def greet(self) -> None:
        """Log what each engine serves, which are the names that agents ask for, or that it does not answer."""
        urls = self._engines.all()
        for url, told in zip(urls, await self._probe(urls), strict=True):
            if told.models:
                names = ", ".join(repr(name) for name, *_ in told.models)
                logger.info("engine %s serves %s", as_asked(url), names)
            else:
                remedy = "start it, or set AJET_UPSTREAM_KEY to its --api-key"
                logger.warning("engine %s does not say what it serves: %s", as_asked(url), remedy)

    async def look(self) -> None:
        """Looks at each engine once."""
        urls = self._engines.all()
        answers = await self._probe(urls)
        held = {url for gate in self._shut() for url in self._engines.behind(gate)}
        for url, told in zip(urls, answers, strict=True):
            self._judge(url, told)
            self._look_frozen(url, "" if url in held else told.resume)
            if not told.models and url in self._noted:
                self._doubted.add(url)
        self._forget(set(urls))

    async def _probe(self, urls: Sequence[str]) -> list[EngineState]:
        async with session(self._key, ANSWER_S) as asking:
            return await asyncio.gather(*(over(asking, url).probe() for url in urls))

    def _judge(self, url: str, told: EngineState) -> None:
        if not told.models:
            if url in self._noted:
                self._due.discard(url)
            return
        now = {"models": told.models, "version": told.version}
        if url in self._due:
            self._due.discard(url)
            self._note(url, now)
        if (said := changed(self._noted.get(url, {}), now)) is None:
            self._others.discard(as_asked(url))
            self._alerts.pop(_serves(url), None)
        else:
            self._others.add(as_asked(url))
            self._alerts[_serves(url)] = (
                f"the engine at {url} {said}: what it samples is not the trained model's. Start it with the right "
                "model, and then the trainer"
            )

    def _look_frozen(self, url: str, resume: str) -> None:
        if not resume:
            self._frozen.discard(url)
            self._alerts.pop(_goes_on(url), None)
        elif url in self._frozen:
            self._alerts[_goes_on(url)] = (
                f"the engine at {url} is frozen, and no gate is shut: its calls wait for ever. {resume}, and if "
                "that does not help, start it again"
            )
        self._frozen |= {url} if resume else set()

    def _note(self, url: str, now: Noted) -> None:
        if self._noted.get(url) == now:
            return
        self._noted[url] = now
        temporary = self._data_dir / f".{FILE}.new"
        with suppress(OSError):  # a full disk has alerts of its own
            temporary.write_text(json.dumps(self._noted))
            os.replace(temporary, self._data_dir / FILE)

    def _forget(self, urls: set[str]) -> None:
        """Engines that are not `urls` are nobody's any more."""
        for url in self._noted.keys() - urls:
            self._others.discard(as_asked(url))
            self._alerts.pop(_serves(url), None)
        for url in self._frozen - urls:
            self._alerts.pop(_goes_on(url), None)
            self._frozen.discard(url)


def _serves(url: str) -> str:
    return f"what {url} serves"


def _goes_on(url: str) -> str:
    return f"whether {url} goes on"
