"""A disk that can be told to fail or to wait, by standing in for the calls that the journal makes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Buffer
from typing import Any

import pytest


class Disk:
    """Until `heal`, the named call fails with the given error; a write may first take some bytes, as real ones do."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._real = {name: getattr(os, name) for name in ("pwrite", "fdatasync", "fsync", "open")}
        self._failing: dict[str, int] = {}
        self._taken = 0
        self._free = threading.Event()
        self._free.set()
        self.synced = 0
        patch.setattr(os, "pwrite", self._pwrite)
        patch.setattr(os, "fdatasync", self._fdatasync)
        patch.setattr(os, "fsync", self._fsync)
        patch.setattr(os, "open", self._open)

    def fail(self, name: str, error: int = errno.ENOSPC, *, taken: int = 0) -> None:
        """`taken` bytes of each refused write reach the disk all the same."""
        self._failing[name] = error
        self._taken = taken

    def heal(self) -> None:
        self._failing = {}

    def hold(self) -> None:
        """Let every sync wait until `release`."""
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    def _check(self, name: str) -> None:
        error = self._failing.get(name)
        if error is not None:
            raise OSError(error, os.strerror(error))

    def _pwrite(self, descriptor: int, data: Buffer, offset: int) -> int:
        if "pwrite" in self._failing and self._taken:
            self._real["pwrite"](descriptor, memoryview(data)[: self._taken], offset)
        self._check("pwrite")
        written: int = self._real["pwrite"](descriptor, memoryview(data)[:1000], offset)
        return written

    def _fdatasync(self, descriptor: int) -> None:
        assert self._free.wait(300)
        self._check("fdatasync")
        self._real["fdatasync"](descriptor)
        self.synced += 1

    def _fsync(self, descriptor: int) -> None:
        self._check("fsync")
        self._real["fsync"](descriptor)

    def _open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & os.O_CREAT:
            self._check("open")
        descriptor: int = self._real["open"](path, flags, mode, **options)
        return descriptor
