"""When the daemon compacts its journal, and what it lets go of afterwards.

The compaction is a process of its own (`ajet_proxy.io.storage.compaction`): replaying takes seconds, and no agent may
wait for it. If it fails, nothing is lost and it is tried again later; the log says so once for each reason. Until then
ended episodes stay in memory and segments on disk, which is what the limits are for. Failing again and again is an
alert, since one day they are reached.

Where retention is set, what has left memory does not wait for a segment to be full. However few episodes there are,
they are in the archive when their time has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

from ajet_proxy.core.ledger.retention import is_due
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.runtime.process import end, give_memory_back
from ajet_proxy.io.storage.compaction import TIED
from ajet_proxy.io.storage.journal import segments, snapshots
from ajet_proxy.io.storage.store import Store
from ajet_sdk.errors import AjetError

logger = logging.getLogger(__name__)

RETRY_S = 60.0
ALERT_AFTER = 3
"""So many failures in a row are no passing trouble."""
RETAIN_S = 3600.0
"""Retention is looked after at least this often."""
AT_ONCE = 500
"""A tick lets go of no more episodes and batches, or of a tenth of those that wait."""
COMMAND = ("-P", "-m", "ajet_proxy.io.storage.compaction")


class Compactor:
    """Call `tick` now and then, and `stop` at the end."""

    def __init__(
        self, store: Store, data_dir: Path, *, metrics: Metrics, now: Callable[[], float], max_age: float = 0.0,
        max_bytes: int = 0,
    ) -> None:
        self._store = store
        self._data_dir = data_dir
        self._metrics = metrics
        self._now = now
        self._max_age, self._max_bytes = max_age, max_bytes
        self._retains = bool(max_age or max_bytes)
        self._task: asyncio.Task[None] | None = None
        self._not_before, self._at_latest = 0.0, 0.0
        self._arrived = True
        self._failing = ""
        """Why it fails, as the log has it."""
        self._failures = 0

    def tick(self) -> None:
        """Let go of what is archived, and start a compaction if one is due. A disk that refuses is asked again."""
        if self._now() < self._not_before or (self._task is not None and not self._task.done()):
            return
        try:
            if self._arrived or self._is_due():
                work = self._forget() if self._arrived else self._run()
                self._task = asyncio.get_running_loop().create_task(work)
        except (OSError, AjetError) as error:
            self._failed(str(error))

    async def stop(self) -> None:
        """End a compaction that runs; the next one begins anew."""
        if self._task is not None:
            await end(self._task)

    async def _forget(self) -> None:
        """Let go of some of what has arrived in the archive."""
        try:
            leaving = len(self._store.state.episodes.leaving)
            self._arrived = await self._store.forget_archived(max(AT_ONCE, leaving // 10))
        except (OSError, AjetError) as error:
            self._failed(str(error))
            return
        if not self._arrived:
            give_memory_back()

    def _is_due(self) -> bool:
        sealed = sum(path.stat().st_size for path in segments(self._data_dir)[:-1])
        snapshot = sum(path.stat().st_size for path in snapshots(self._data_dir)[-1:])
        return is_due(sealed, snapshot) or (self._retains and self._now() >= self._at_latest)

    async def _run(self) -> None:
        """Run one compaction. It ends with this process, which holds the other end of its input."""
        try:
            if self._retains and self._store.state.episodes.leaving:
                await self._store.end_segment()
            ended_after = self._now() - self._max_age if self._max_age else 0.0
            limits = (str(self._data_dir), str(ended_after), str(self._max_bytes), TIED)
            process = await asyncio.create_subprocess_exec(
                sys.executable, *COMMAND, *limits, stdin=PIPE, stdout=PIPE, stderr=PIPE
            )
        except (OSError, AjetError) as error:
            self._failed(f"a compaction cannot be started: {error}")
            return
        assert process.stdout is not None and process.stderr is not None
        try:
            out, errors, _ = await asyncio.gather(process.stdout.read(), process.stderr.read(), process.wait())
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        self._arrived = True  # also if it failed later on: what retention may remove next time must be let go of before
        said = errors.decode("utf-8", "replace").strip()
        if process.returncode != 0:
            self._failed(said or "a compaction was killed")
            return
        if said:
            logger.warning("%s", said)
        self._at_latest, self._failing, self._failures = self._now() + RETAIN_S, "", 0
        self._store.trouble.pop("compaction", None)
        self._metrics.inc("ajet_removed_episodes_total", int(out))
        self._metrics.inc("ajet_compactions_total", outcome="done")

    def _failed(self, why: str) -> None:
        self._not_before = self._now() + RETRY_S
        self._failures += 1
        if self._failures >= ALERT_AFTER:
            self._store.trouble["compaction"] = (
                f"compaction failed {self._failures} times in a row: memory and disk fill up with what has ended (the "
                "log says why)"
            )
        self._metrics.inc("ajet_compactions_total", outcome="failed")
        if why != self._failing:
            logger.error("%s; it is tried again every %.0f seconds", why, RETRY_S)
        self._failing = why
