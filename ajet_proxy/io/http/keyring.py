"""The secrets that sign keys, and the keys that were revoked: two small files of the data directory.

``secret`` holds secrets of 32 bytes, the newest first; ``revoked`` holds one JSON line for each revocation. Commands
change them while the daemon runs, and the daemon looks at them on each tick. So a rotation or a revocation needs no
restart, and no daemon that answers.

Invariant: each is replaced as a whole and is on disk before its command ends. A reader sees the state before a command
or after it. Both are for the owner of the data directory alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from ajet_proxy.core.identity.keys import Keys, Ring
from ajet_sdk.settings import ConfigError
from ajet_sdk.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

SIZE = 32
SECRET, REVOKED = "secret", "revoked"


def used(data_dir: Path) -> bool:
    """True if a proxy, or a command for one, has made its secret in `data_dir`."""
    return (data_dir / SECRET).exists()


def ring(data_dir: Path) -> Ring:
    """The ring that the files hold; a secret is made if there is none. Deleting ``secret`` voids all keys at the next
    start."""
    path = data_dir / SECRET
    if not path.exists():
        with _locked(data_dir):
            if not path.exists():
                _replace(path, secrets.token_bytes(SIZE))
    return _read(data_dir)


def keys(data_dir: Path, *, admin_secret: str | None = None, traffic: str = "") -> Keys:
    """Keys with the ring of `data_dir`. Without one, `traffic` is the lane of users' traffic."""
    found = ring(data_dir)
    made = Keys(found.secrets[0], admin_secret=admin_secret, traffic=traffic)
    made.ring = found
    return made


def rotate(data_dir: Path, *, drop_old: bool) -> int:
    """Sign with a new secret from now on. Returns how many older secrets stay, whose keys remain valid."""
    ring(data_dir)
    with _locked(data_dir):
        old = () if drop_old else _read(data_dir).secrets
        _replace(data_dir / SECRET, b"".join((secrets.token_bytes(SIZE), *old)))
    return len(old)


def revoke(data_dir: Path, kind: str, name: str, at: float) -> None:
    """Void a ``key`` (by its `key_id`), or the keys issued for a ``tenant`` or an ``episode`` up to Unix time `at`."""
    path = data_dir / REVOKED
    with _locked(data_dir):
        text = _text(path) + json.dumps([kind, name, at]) + "\n"
        _replace(path, text.encode())


class Watch:
    """Puts what the files say into `keys` whenever they have changed."""

    def __init__(self, data_dir: Path, keys: Keys) -> None:
        self._data_dir = data_dir
        self._keys = keys
        self._files = WatchedFiles("the keys stay as they were", (data_dir / SECRET, data_dir / REVOKED), logger.error)

    def tick(self) -> None:
        """Look again."""
        found = self._files.take(lambda: _read(self._data_dir))
        if found is not None and found != self._keys.ring:
            self._keys.ring = found
            logger.info("took up the changed secrets and revocations of %s", self._data_dir)


def _read(data_dir: Path) -> Ring:
    path = data_dir / SECRET
    data = path.read_bytes()
    if not data or len(data) % SIZE:
        raise ConfigError(f"{path} is damaged: delete it (all keys are then void)")
    named: dict[str, dict[str, float]] = {"key": {}, "tenant": {}, "episode": {}}
    try:
        for line in _text(data_dir / REVOKED).splitlines():
            kind, name, at = json.loads(line)
            named[kind][name] = max(at, named[kind].get(name, 0.0))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{data_dir / REVOKED} is damaged: mend it, or delete it and rotate the secret") from error
    parts = tuple(data[start : start + SIZE] for start in range(0, len(data), SIZE))
    return Ring(parts, frozenset(named["key"]), named["tenant"], named["episode"])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Run one command at a time."""
    handle = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, for the directory's owner alone: root may run the command for the daemon's user."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    owner = path.parent.stat()
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        if os.geteuid() == 0:
            os.fchown(stream.fileno(), owner.st_uid, owner.st_gid)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, path)
