"""The journal: every event on disk, in order, before anyone is told that it happened.

Idea: records are appended to segment files. A writer thread takes all that is pending, writes it with one call and
makes it durable with one fdatasync (group commit). So everyone who waits shares the cost of durability.

A snapshot (`ajet_proxy.io.storage.snapshot`) stands for all segments up to its number; only later ones are read.

A segment is ``MAGIC`` and then records, each ``length, crc32`` (big-endian uint32) and ``length`` bytes. A record
counts if its checksum fits and it is no longer than `MAX_RECORD`; no other is written. Reading stops at the first that
does not count. At the end of the last segment that is a torn tail: it is cut off and reported. With a whole record
behind it, or in an earlier segment, it is damage that no crash explains, and opening refuses.

Invariant: what `durable` counts survives a kill and a power cut. When the disk refuses, nothing pending is dropped. The
file is cut back to its last durable record, and all that is pending is written again, in order, until it works. Nothing
counts as durable in a file that a start would not find. Around each write, and regularly without one, the writer looks
whether its segment still stands at its path, as long as it left it. Put back there, it goes on.

Next: ajet_proxy/io/capture/recorder.py
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from struct import Struct
from typing import BinaryIO
from zlib import crc32

from ajet_sdk.errors import AjetError, TooLarge

logger = logging.getLogger(__name__)

MAGIC = b"ajet-journal-1\n"
FRAME = Struct(">II")
SEGMENT_BYTES = 16 << 20
RETRY_S = 1.0
MAX_RECORD = 1 << 30
BEGINNING = re.compile(rb"\x92[\xa0-\xbf][A-Z]")
"""The beginning of every record (`ajet_proxy.io.storage.codec`): a list of two, of which the first is an event's
name."""
NUMBER = "[0-9]" * 8
"""The pattern of the names of segments and snapshots, before their suffix."""
END_OF_SEGMENT = b""
"""Stands among records that are to be written: what comes behind it goes into another segment."""


class JournalDamaged(AjetError):
    """A record before the journal's tail cannot be read."""

    status = 500
    type = "journal_damaged"


class JournalGone(OSError):
    """The file that is being written is no longer the journal's."""


def folder_of(data_dir: Path) -> Path:
    """Where segments and snapshots are."""
    return data_dir / "journal"


def snapshots(data_dir: Path) -> list[Path]:
    """The snapshots, oldest first. All but the last are leftovers."""
    return sorted(folder_of(data_dir).glob(f"{NUMBER}.snapshot"))


def segments(data_dir: Path) -> list[Path]:
    """The segments after the latest snapshot, oldest first. `JournalDamaged` if one is missing; there must be one after
    a snapshot, because no snapshot takes in the last one."""
    behind = max((path.stem for path in snapshots(data_dir)), default=f"{0:08d}")
    found = sorted(path for path in folder_of(data_dir).glob(f"{NUMBER}.log") if path.stem > behind)
    if behind.strip("0") and not found:
        path = folder_of(data_dir) / f"{int(behind) + 1:08d}.log"
        raise JournalDamaged(
            f"{path} is missing; it begins where the snapshot before it ends: restore it from a copy, or `touch` it "
            "to continue without what happened since", code="journal_damaged",
        )
    for number, path in enumerate(found, int(behind) + 1):
        if int(path.stem) != number:
            raise JournalDamaged(
                f"{path.with_stem(f'{number:08d}')} is missing, and {path.name} is there: restore from a copy what "
                "lies before it, segments or their snapshot", code="journal_damaged",
            )
    return found


def framed(records: Iterable[bytes]) -> bytes:
    """`records` as a file holds them; `TooLarge` for one that nobody could read there."""
    return b"".join(
        part for record in records for part in (FRAME.pack(len(readable(record)), crc32(record)), record)
    )


def readable(record: bytes) -> bytes:
    """`record`, or `TooLarge` if it is longer than any that is read."""
    if len(record) > MAX_RECORD:
        raise TooLarge(
            f"a record of {len(record)} bytes is more than the journal holds ({MAX_RECORD})", code="record_too_large"
        )
    return record


def read(path: Path) -> Iterator[tuple[bytes, int]]:
    """The whole records of one file, each with the offset of its end, read one after the other."""
    with path.open("rb") as file:
        yield from _whole(file)


def _whole(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    if file.read(len(MAGIC)) != MAGIC:
        return
    while len(head := file.read(FRAME.size)) == FRAME.size:
        length, checksum = FRAME.unpack(head)
        record = file.read(length) if 0 < length <= MAX_RECORD else b""
        if not record or len(record) < length or crc32(record) != checksum:
            return
        yield record, file.tell()


def _stands(data: bytes, at: int) -> int:
    """The end of the whole record at offset `at`; `at` itself if there is none."""
    start = at + FRAME.size
    if start > len(data):
        return at
    length, checksum = FRAME.unpack_from(data, at)
    end = start + length
    fits = 0 < length <= MAX_RECORD and end <= len(data)
    return end if fits and crc32(memoryview(data)[start:end]) == checksum else at


def records(data_dir: Path) -> Iterator[bytes]:
    """Every whole record, for reading only. A torn tail is left out, damage elsewhere is `JournalDamaged`. A daemon may
    be writing the last segment: what it has of it at one moment counts."""
    paths = segments(data_dir)
    for path in paths:
        for record, _ in read_segment(path, last=path == paths[-1]):
            yield record


def read_segment(path: Path, *, last: bool) -> Iterator[tuple[bytes, int]]:
    """`read`, then `JournalDamaged` if whole records do not fill the segment. Only the `last` may have a torn tail."""
    data, end = path.read_bytes(), 0
    for record, end in _whole(io.BytesIO(data)):
        yield record, end
    if max(end, len(MAGIC)) != len(data) and (not last or _more_follows(data, end)):
        raise JournalDamaged(
            f"{path} is damaged at byte {end}, before the end of the journal: restore it from a copy, or give "
            f"up what follows: `truncate -s {end}` it and move later segments away", code="journal_damaged",
        )


def _more_follows(data: bytes, end: int) -> bool:
    """Tell whether whole records follow the damage at `end`: then it is no torn tail. One may stand right there (behind
    the damaged beginning of a segment), or where the damaged record says that it ends. If that length is damaged too,
    records are looked for by how they begin. They count if they go on to the end of the file. What an agent put into a
    torn record cannot do that."""
    start = max(end, len(MAGIC))
    if start + FRAME.size > len(data):
        return False
    behind = start + FRAME.size + FRAME.unpack_from(data, start)[0]
    if _stands(data, start) > start or _stands(data, behind) > behind:
        return True
    reached = start
    for found in BEGINNING.finditer(data, start + FRAME.size):
        if found.start() - FRAME.size >= reached:
            reached = found.start() - FRAME.size
            while (end := _stands(data, reached)) > reached:
                reached = end
            if reached == len(data):
                return True
    return False


class Journal:
    """Appends records. `on_progress` is called from the writer thread whenever `durable` or `error` has changed."""

    def __init__(
        self, data_dir: Path, on_progress: Callable[[], None], *, segment_bytes: int = SEGMENT_BYTES,
        retry_s: float = RETRY_S,
    ) -> None:
        self.durable = 0
        """Records of this run that are on disk."""
        self.appended = 0
        self.error: OSError | MemoryError | None = None
        """Why nothing can be written at the moment, if so."""
        self._folder = folder_of(data_dir)
        self._on_progress = on_progress
        self._segment_bytes = segment_bytes
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._pending: deque[bytes] = deque()
        self._due = False
        self._closing = False
        self._descriptor = -1
        self._path = self._folder
        """The segment that is written, once there is one."""
        self._made: os.stat_result
        """The status of its file, by which this is known: a file that is open keeps its number."""
        self._number, self._end = 0, 0
        self._named = True
        """True if the name of its file is on disk."""
        self._ragged = False
        """True if bytes of a record that is not durable may stand behind the last one that is."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def open(self) -> Iterator[bytes]:
        """Every record on disk. Once all are taken, a torn tail is cut off and writing begins."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(self._folder.parent)
        paths = segments(self._folder.parent)
        self._number = max((int(path.stem) for path in snapshots(self._folder.parent)), default=0)
        for path in paths:
            self._number, self._end = int(path.stem), 0
            for record, self._end in read_segment(path, last=path == paths[-1]):
                yield record
        if paths:
            self._cut_tail(paths[-1])
        self._thread.start()

    def append(self, records: Iterable[bytes], *, flush: bool = True) -> int:
        """Queue `records` for writing: now or, without `flush`, with the next that are. They are on disk when `durable`
        has reached the returned number. If one is `END_OF_SEGMENT`, another segment has been begun by then."""
        with self._changed:
            before = len(self._pending)
            self._pending.extend(records)
            self.appended += len(self._pending) - before
        if flush:
            self.flush()
        return self.appended

    def flush(self) -> None:
        """Have all that is queued written now."""
        with self._changed:
            self._due = True
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> int:
        """Write what is pending and end. Returns how many records could not be written in `timeout_s` seconds. If
        `error` is then a `JournalGone`, a start would not find what is durable."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._descriptor >= 0 and not self._thread.is_alive():
            try:
                self._look()
                self.error = None if isinstance(self.error, JournalGone) else self.error
            except OSError as error:
                self.error = error
            os.close(self._descriptor)
            self._descriptor = -1
        return self.appended - self.durable

    def _cut_tail(self, path: Path) -> None:
        """End the last segment after its last whole record. The rest is kept next to it for a person to look at."""
        self._end = max(self._end, len(MAGIC)) if path.stat().st_size >= len(MAGIC) else 0
        self._descriptor, self._path = os.open(path, os.O_RDWR), path
        self._made = os.fstat(self._descriptor)
        if os.pread(self._descriptor, len(MAGIC), 0) != MAGIC:
            self._end = 0
        size = os.fstat(self._descriptor).st_size
        if size > self._end:
            torn = size - self._end
            with contextlib.suppress(OSError):
                path.with_suffix(f".torn-{self._end}").write_bytes(os.pread(self._descriptor, torn, self._end))
            logger.warning("the journal's tail was damaged: cut %d bytes off %s at byte %d", torn, path, self._end)
            os.ftruncate(self._descriptor, self._end)
        if self._end == 0:
            self._end = _put(self._descriptor, MAGIC, 0)
        os.fsync(self._descriptor)

    def _run(self) -> None:
        """The writer thread: whatever is pending becomes durable together; a refusal is tried again."""
        while (batch := self._next_batch()) is not None:
            is_last = self._closing  # before it is written: the disk may have healed since an older try began
            try:
                self._write(batch)
            except (OSError, MemoryError) as error:
                if str(error) != str(self.error):
                    logger.error("the journal cannot write: %s; intake stops until it can", error)
                self.error = error
                if self._ragged:  # nothing is left behind the last durable record, if the disk allows that much
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._descriptor, self._end)
                        self._ragged = False
                self._on_progress()
                with self._changed:
                    self._due = True
                    if is_last:
                        return
                    self._changed.wait_for(lambda: self._closing, self._retry_s)
                continue
            told = self.error is None and not batch
            if self.error is not None:
                logger.warning("the journal writes again; %d records were held back and none was lost", len(batch))
                self.error = None
            with self._changed:
                for _ in batch:
                    self._pending.popleft()
                self.durable += len(batch)
            if not told:
                self._on_progress()

    def _next_batch(self) -> list[bytes] | None:
        """Return what to write together. It is empty if nothing came for so long that the file should be looked at, and
        None at the end."""
        with self._changed:
            while not (self._due and self._pending) and not self._closing:
                self._due = False
                if not self._changed.wait(self._retry_s):
                    return []
            if not self._pending:
                return None
            batch = list(self._pending)
            if END_OF_SEGMENT in batch:
                batch = batch[: batch.index(END_OF_SEGMENT)] or [END_OF_SEGMENT]
            self._due = len(batch) < len(self._pending)
            return batch

    def _look(self) -> None:
        """`JournalGone` if the segment that is being written is not where a start would look for it."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            there = os.stat(self._path)
            if os.path.samestat(there, self._made) and there.st_size >= self._end:
                return
        raise JournalGone(
            f"{self._path} was moved, removed, replaced or cut short under the proxy: put {self._folder} back as it "
            "was, and it continues; if that is gone, stop the proxy and restore it from a copy"
        )

    def _write(self, batch: list[bytes]) -> None:
        """Append `batch` behind the last durable record and make it durable, where a start finds it."""
        if not batch:
            self._look()
            return
        ends = batch == [END_OF_SEGMENT]
        if not ends:
            self._look()
        full = self._end > len(MAGIC) and (ends or self._end >= self._segment_bytes)
        if full or (self._descriptor < 0 and not ends):
            self._next_segment()
        if not self._named:
            sync_folder(self._folder)
            self._named = True
        if ends:
            return
        data = framed(batch)
        if self._ragged:
            os.ftruncate(self._descriptor, self._end)
        self._ragged = True
        end = _put(self._descriptor, data, self._end)
        os.fdatasync(self._descriptor)
        self._look()
        self._end, self._ragged = end, False

    def _next_segment(self) -> None:
        """Begin another segment. Once it has its name, a compaction may take the one before for ended and remove it. So
        it gets that last, and nothing is written to the one before from then on, whatever the disk says next."""
        self._look()
        path = self._folder / f"{self._number + 1:08d}.log"
        new = path.with_suffix(".log.new")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _put(descriptor, MAGIC, 0)
            os.fsync(descriptor)
            made = os.fstat(descriptor)
            new.rename(path)
        except OSError:
            os.close(descriptor)
            raise
        self._named = False
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._path, self._made = descriptor, path, made
        self._number, self._end = self._number + 1, len(MAGIC)


def _put(descriptor: int, data: bytes, at: int) -> int:
    """Write all of `data` at offset `at`; returns where it ends."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
    return at


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
