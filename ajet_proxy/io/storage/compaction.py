"""Compaction: what the ended segments of a journal say becomes a snapshot and rows of the archive.

Idea: it works on files alone and repeats what the daemon did: the last snapshot, then the segments behind it, but never
the one that is being written. So it needs no lock on the daemon's state and runs in a process of its own, with low
priority. Each step is durable before the next, and none takes away what the ones before have not replaced:

1. episodes and batches that were archived go into the archive, in one transaction;
2. the state goes into a snapshot, which is read back and renamed into its place;
3. the segments and snapshots that it stands for are removed;
4. retention takes what is too old, or too much, out of the archive.

Invariant: whenever it is killed, or fails, a start finds the same state and the archive the same episodes. What was
done twice is there once.

    python -m ajet_proxy.io.storage.compaction DATA_DIR ENDED_AFTER MAX_BYTES     prints how many episodes were removed

By ENDED_AFTER, in Unix seconds, the daemon's clock counts, which had the episodes end, and not the system's.

The daemon adds ``tied`` to these: then it ends at once when its standard input does. The daemon holds the other end and
writes nothing, so no orphan of a killed daemon keeps the next one waiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from ajet_proxy.core.ledger.state import LedgerSettings
from ajet_proxy.io.storage import snapshot
from ajet_proxy.io.storage.archive import Archiver, refuse_missing
from ajet_proxy.io.storage.data_dir import ARCHIVE, COMPACTING
from ajet_proxy.io.storage.journal import NUMBER, folder_of, read_segment, segments, snapshots, sync_folder
from ajet_sdk.errors import AjetError

TIED = "tied"
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""Where memory runs out, this process goes before the daemon: it can be run again."""


@contextlib.contextmanager
def alone(data_dir: Path) -> Iterator[None]:
    """A block in which no other compaction of `data_dir` runs; one that runs already is waited for."""
    descriptor = os.open(data_dir / COMPACTING, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def compact(data_dir: Path, *, ended_after: float = 0.0, limit: int = 0) -> int:
    """Compact the journal in `data_dir`; see `Archiver.retain` for the rest. Returns how many episodes were removed."""
    with alone(data_dir):
        if snapshots(data_dir) and not (data_dir / ARCHIVE).exists():  # which was there, and would be made anew
            refuse_missing(data_dir, snapshot.load(data_dir, LedgerSettings()))
        with contextlib.closing(Archiver(data_dir)) as archiver:
            ended = segments(data_dir)[:-1]
            if ended:
                ended_records = (record for path in ended for record, _ in read_segment(path, last=False))
                state = snapshot.replay(data_dir, ended_records, snapshot.load(data_dir, LedgerSettings()))
                archiver.put(state.episodes.leaving.values(), state.batches.leaving.values())
                snapshot.save(data_dir, int(ended[-1].stem), state)
            _tidy(data_dir)
            return archiver.retain(ended_after, limit)


def _tidy(data_dir: Path) -> None:
    """Remove the files that the latest snapshot stands for, and what a killed compaction left."""
    folder = folder_of(data_dir)
    if not folder.is_dir():
        return
    behind = max((path.stem for path in snapshots(data_dir)), default="")
    for path in sorted(folder.iterdir()):
        older = any(path.match(f"{NUMBER}.{kind}") for kind in ("log", "snapshot")) and path.stem < behind
        if older or path.name == f"{behind}.log" or path.name.endswith(".snapshot.new"):
            path.unlink()
    sync_folder(folder)


def _end_with_input() -> None:
    os.read(0, 1)
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Compact, as the daemon's child process. An error becomes its exit status and one line on stderr, where a warning
    may stand too."""
    data_dir, ended_after, limit = Path(arguments[0]), float(arguments[1]), int(arguments[2])
    if arguments[3:] == [TIED]:
        threading.Thread(target=_end_with_input, daemon=True).start()
    with contextlib.suppress(OSError):
        OOM_SCORE.write_text("1000")
    with contextlib.suppress(OSError):  # the unit of `ajet_proxy.systemd` has no right to it
        os.nice(10)
    try:
        removed = compact(data_dir, ended_after=ended_after, limit=limit)
    except (OSError, MemoryError, sqlite3.Error, AjetError) as error:
        sys.exit(f"cannot compact {data_dir}: {str(error) or type(error).__name__}")
    sys.stdout.write(f"{removed}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
