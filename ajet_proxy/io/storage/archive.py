"""The archive: ended episodes and their batches, each found by its name, in one SQLite file.

Idea: one row an episode, with a ``head`` for listings and a ``body``, the whole episode, and one row a batch. SQLite
brings what this needs. Its index is not in memory. Its transactions survive a kill, a full disk and a power cut. No
writer holds up its readers (its write-ahead log). Only the compaction writes.

Retention removes whole rows, the oldest first, so what is kept has a bound whatever an episode is made of. What ended
up to some moment goes, and a batch goes with the last of its episodes. Counters are the state's, and need no rows.

A row of SQLite holds 1e9 bytes at most, so an episode larger than `MAX_BODY` is kept as its head.

Writing an episode again changes nothing, so a compaction that was killed is simply run again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from ajet_proxy.core.identity.headers import is_text
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.queues import LeasedBatch
from ajet_proxy.core.ledger.retention import to_remove
from ajet_proxy.core.ledger.state import State
from ajet_proxy.io.storage.data_dir import ARCHIVE
from ajet_proxy.io.storage.journal import JournalDamaged
from ajet_proxy.io.storage.snapshot import pack, unpack
from ajet_sdk.errors import NotReady

logger = logging.getLogger(__name__)

MAX_BODY = 512 << 20
RETRY_AFTER_S = 2.0
BUSY_S = 60.0
VERSION = 1
TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS episodes (
    name TEXT PRIMARY KEY, state TEXT NOT NULL, task TEXT, ended REAL NOT NULL, size INTEGER NOT NULL,
    head BLOB NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_state ON episodes (state);
CREATE INDEX IF NOT EXISTS by_task ON episodes (task, state);
CREATE INDEX IF NOT EXISTS by_end ON episodes (ended, size);
CREATE TABLE IF NOT EXISTS batches (
    name TEXT PRIMARY KEY, number INTEGER NOT NULL, ended REAL NOT NULL, record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_number ON batches (number);
CREATE INDEX IF NOT EXISTS batches_by_end ON batches (ended);
PRAGMA user_version = {VERSION};
COMMIT;
"""


class ArchiveFile:
    """The archive of one data directory, for reading. It need not exist yet."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / ARCHIVE
        self._connection: sqlite3.Connection | None = None
        self._one_at_a_time = Lock()

    def close(self) -> None:
        with self._one_at_a_time:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def episode(self, name: str) -> Episode | None:
        """The whole episode; None if it is not in the archive."""
        rows = self._ask("SELECT body FROM episodes WHERE name = ?", name)
        return next((unpack(record) for (record,) in rows), None)

    def batch(self, name: str) -> LeasedBatch | None:
        rows = self._ask("SELECT record FROM batches WHERE name = ?", name)
        return next((unpack(record) for (record,) in rows), None)

    def latest(self, state: str | None, task: str | None, before: str | None, limit: int) -> Iterator[Episode]:
        """The heads of at most `limit` episodes that were archived before the episode `before`, the latest first."""
        wanted = {
            "state = ?": state, "task = ?": task, "rowid < (SELECT rowid FROM episodes WHERE name = ?)": before,
        }
        terms = {term: value for term, value in wanted.items() if value is not None}
        where = f"WHERE {' AND '.join(terms)}" if terms else ""
        rows = self._ask(f"SELECT head FROM episodes {where} ORDER BY rowid DESC LIMIT ?", *terms.values(), limit)
        return (unpack(head) for (head,) in rows)

    def episodes(self, states: Iterable[str]) -> Iterator[Episode]:
        """Every episode in one of `states` as `episode` gives it, the oldest first."""
        wanted = tuple(states)
        marks = ",".join("?" * len(wanted))
        question = f"SELECT body FROM episodes WHERE state IN ({marks}) ORDER BY rowid"
        with self._said():
            for (record,) in self._rows(question, wanted):
                yield unpack(record)

    def batches(self) -> Iterator[LeasedBatch]:
        """Every batch in the order of its lease."""
        return (unpack(record) for (record,) in self._ask("SELECT record FROM batches ORDER BY number"))

    def holds(self, table: str, names: Iterable[str]) -> list[str]:
        """The first of `names`, as far as they are in `table`. Names leave memory in the order in which they come
        here."""
        return list(takewhile(lambda name: self._ask(f"SELECT 1 FROM {table} WHERE name = ?", name), names))

    def _ask(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows at once, or `NotReady`. No row for a value that is not valid text, which names nothing."""
        if not all(is_text(value) for value in values if isinstance(value, str)):
            return []
        with self._said(), self._one_at_a_time:
            return list(self._rows(question, values))

    @contextmanager
    def _said(self) -> Iterator[None]:
        """SQLite's errors as `NotReady`. For those that no waiting mends, it says what does."""
        try:
            yield
        except sqlite3.Error as error:
            advice = "" if isinstance(error, sqlite3.OperationalError) else ": restore it from a copy"
            raise NotReady(
                f"{self._path} cannot be read: {error}{advice}", code="archive", retry_after=RETRY_AFTER_S
            ) from error

    def _rows(self, question: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = _connected(self._path)
        if self._connection is not None:
            yield from self._connection.execute(question, values)


def refuse_missing(data_dir: Path, compacted: State) -> None:
    """`JournalDamaged` if `compacted`, a snapshot's state, has archived episodes and there is no archive: nobody would
    know any more that they were trained."""
    path, episodes = data_dir / ARCHIVE, sum(compacted.episodes.archived.values())
    if episodes and not path.exists():
        raise JournalDamaged(
            f"{path} is missing; it held {episodes} ended episodes: restore it from a copy, or `touch` it to "
            "continue without them", code="archive_missing",
        )


class Archiver:
    """Writes the archive of one data directory; there is one at a time."""

    def __init__(self, data_dir: Path) -> None:
        path = data_dir / ARCHIVE
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
        try:
            _check(self._connection)
            for setting in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = FULL"):
                self._connection.execute(f"PRAGMA {setting}").close()
            self._connection.executescript(TABLES)
            self._known = {
                table: self._one(f"SELECT coalesce(max(rowid), 0) FROM {table}") for table in ("batches", "episodes")
            }
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def put(self, episodes: Iterable[Episode], batches: Iterable[LeasedBatch]) -> None:
        """Add them; they are durable when this returns."""
        with self._connection as connection:  # which commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", map(_row, episodes)
            )
            connection.executemany(
                "INSERT INTO batches VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                ((batch.id, batch.number, self._ended(batch), pack(batch)) for batch in batches),
            )

    def retain(self, ended_after: float, limit: int) -> int:
        """Remove what ended before `ended_after`, and the oldest until the rest takes no more than `limit` bytes (0: no
        limit). What was put since this archiver was made stays: the daemon has yet to see that it is here. Returns how
        many episodes were removed."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            removed = self._remove("ended < ?", ended_after)
            while limit and (last := self._last_to_go(limit)) is not None:
                removed += self._remove("ended <= ?", last)
        if removed:
            self._connection.execute("PRAGMA incremental_vacuum").fetchall()
        return removed

    def _one(self, question: str, *values: Any) -> Any:
        """The one value that answers it."""
        return self._connection.execute(question, values).fetchone()[0]

    def _ended(self, batch: LeasedBatch) -> float:
        """When the last of the batch's episodes ended. They come here before it or with it."""
        ends = [self._one("SELECT max(ended) FROM episodes WHERE name = ?", name) for name in batch.episodes()]
        return max((end for end in ends if end is not None), default=0.0)

    def _last_to_go(self, limit: int) -> float | None:
        """When the last episode ended that must go; None if none must go, or there is none. What takes room on disk is
        pages, which rows fill in part. So the rows' sizes are cut down by the same share as the pages must be. Some
        more may have to go after these."""
        used = (self._one("PRAGMA page_count") - self._one("PRAGMA freelist_count")) * self._one("PRAGMA page_size")
        if used <= limit:
            return None
        total = self._one("SELECT coalesce(sum(size), 0) FROM episodes")
        question = "SELECT ended, size FROM episodes WHERE rowid <= ? ORDER BY ended"
        with closing(self._connection.execute(question, (self._known["episodes"],))) as rows:
            return max(to_remove(rows, total, total * limit // used), default=None)

    def _remove(self, which: str, ended: float) -> int:
        """Remove the rows that `which` selects by when they ended; returns how many episodes that were."""
        removed = 0
        for table, newest in self._known.items():  # the episodes come last
            delete = f"DELETE FROM {table} WHERE {which} AND rowid <= ?"
            removed = self._connection.execute(delete, (ended, newest)).rowcount
        return removed


def _check(connection: sqlite3.Connection) -> bool:
    """Tell whether there are tables; `sqlite3.DatabaseError` if they are not ours."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise sqlite3.DatabaseError("another version of ajet-proxy wrote it")
    return bool(version)


def _connected(path: Path) -> sqlite3.Connection | None:
    """A connection for reading, which must not become the one that writes; None while there are no tables. Where nobody
    may write, as on a copy mounted for reading, SQLite must be told not to lay its own files next to it."""
    if not path.exists():
        return None
    still = not os.access(path.parent, os.W_OK) and not path.with_name(f"{ARCHIVE}-wal").exists()
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?{'immutable=1' if still else 'mode=rw'}", uri=True, isolation_level=None,
        timeout=BUSY_S, check_same_thread=False,
    )
    made = False
    try:
        connection.execute("PRAGMA query_only = 1").close()
        made = _check(connection)
    finally:
        if not made:
            connection.close()
    return connection if made else None


def _row(episode: Episode) -> tuple[Any, ...]:
    short, body = episode.head(), pack(episode) if episode.transcript.size() <= MAX_BODY else b""
    if not 0 < len(body) <= MAX_BODY:
        logger.warning("episode %s has more than %d bytes: it is archived without its calls", episode.id, MAX_BODY)
        noted = {name: replace(one, note=episode.rewards[name].note) for name, one in short.rewards.items()}
        body = pack(replace(short, rewards=noted, stored="removed"))
    head = pack(short)
    return episode.id, episode.state, episode.opening.task, episode.ended_at, len(head) + len(body), head, body
