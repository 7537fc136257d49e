"""The data directory at a start: held by one proxy, and begun once.

Idea: the first segment of the journal is on disk before any of `TRACES` is made, and only a snapshot replaces segments.
So a directory with one of those and without a journal has lost it. To begin anew there would look like success: keys
and archive are there, and all episodes are gone. A directory that was only prepared (a lock, secrets, a CA) has none of
them.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ajet_proxy.io.storage.journal import MAGIC, JournalDamaged, folder_of, segments, snapshots, sync_folder
from ajet_sdk.errors import Conflict

COMPACTING = "compacting"
"""The file that a compaction locks, and a start."""
ARCHIVE = "archive.sqlite"
TRACES = (COMPACTING, ARCHIVE)
"""Files that only a proxy with a journal makes."""


def lock(data_dir: Path) -> int:
    """An open descriptor that holds `data_dir` for this process, or `Conflict` if another proxy has it."""
    descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise Conflict(
            f"another proxy (process {owner}) is using {data_dir}: stop it, or give this one another --data-dir",
            code="data_dir_locked",
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def refuse_lost(data_dir: Path) -> None:
    """`JournalDamaged` if `data_dir` once had a journal and has none now."""
    traces = [name for name in TRACES if (data_dir / name).exists()]
    if traces and (not has_journal(data_dir) or _is_blank(data_dir)):
        raise JournalDamaged(
            f"{folder_of(data_dir)} holds no journal, and {' and '.join(traces)} next to it show that there was one: "
            f"restore it from a copy; or, to begin anew, move {data_dir} away, or {' and '.join(traces)} alone to keep "
            "the keys", code="journal_missing",
        )


def has_journal(data_dir: Path) -> bool:
    """Tell whether a start finds a journal; `JournalDamaged` if a part of it is missing."""
    return bool(segments(data_dir) or snapshots(data_dir))


def _is_blank(data_dir: Path) -> bool:
    """Tell whether the only segment does not even begin as it did before anybody wrote to it."""
    found = segments(data_dir)
    if snapshots(data_dir) or len(found) != 1:
        return False
    with found[0].open("rb") as file:
        return file.read(len(MAGIC)) != MAGIC


def begin(data_dir: Path) -> None:
    """Make a journal's first segment, unless there is a journal; `JournalDamaged` if there was one that is lost."""
    refuse_lost(data_dir)
    if has_journal(data_dir):
        return
    folder = folder_of(data_dir)
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / f"{1:08d}.log", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.pwrite(descriptor, MAGIC, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(folder)
    sync_folder(data_dir)
