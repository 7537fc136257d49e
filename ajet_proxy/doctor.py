"""Checks of everything the proxy depends on, each with what to do about a fault.

A check returns findings and never raises; the proxy itself is not touched, so `doctor` may run at the same time.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import shutil
import stat
from pathlib import Path

import aiohttp

from ajet_proxy.engine_checks import EngineChecks
from ajet_proxy.io.engines.upstream import base_url
from ajet_proxy.io.http import keyring
from ajet_proxy.io.intercept import authority
from ajet_proxy.io.storage.data_dir import has_journal, refuse_lost
from ajet_proxy.io.storage.journal import JournalDamaged, folder_of
from ajet_proxy.settings import Config
from ajet_sdk.findings import Finding, fault, ok, warning
from ajet_sdk.ports import listener
from ajet_sdk.settings import ConfigError

LOW_DISK = 1 << 30
RENEWAL = datetime.timedelta(days=30)
AS_ITS_USER = "run doctor as the user that runs the proxy (or as root)"

async def examine(config: Config) -> list[Finding]:
    """Every check, in the order in which faults should be repaired."""
    return [*_data_dir(config), *_retention(config), *await _upstreams(config)]


def _data_dir(config: Config) -> list[Finding]:
    path, check = Path(config.data_dir), "data directory"
    try:
        there = path.exists()
    except PermissionError:
        return [fault(check, f"this user may not look at {path}", f"{AS_ITS_USER}, or choose another --data-dir")]
    if not there:
        parent = next(p for p in path.absolute().parents if p.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return [ok(check, f"{path} does not exist yet and can be made"), _disk(parent), *_running(config)]
        return [fault(check, f"{path} does not exist and {parent} is not writable",
                       f"make it for the user that runs the proxy: mkdir -m 700 {path}, or choose --data-dir")]
    if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return [fault(check, f"{path} is not a directory that this user can write",
                       "chown it to the user that runs the proxy, or choose another --data-dir")]
    found = [ok(check, str(path))]
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        found.append(warning("permissions", f"others can look into {path}", f"chmod 700 {path}"))
    secret = path / "secret"
    if secret.exists() and stat.S_IMODE(secret.stat().st_mode) & 0o077:
        found.append(fault("permissions", f"{secret} is readable by others", f"chmod 600 {secret}"))
    found += [*_strangers(path), *_journal(path), *_keys(path), *_authority(path / "ca")]
    return [*found, _disk(path), *_running(config)]


def _strangers(path: Path) -> list[Finding]:
    """Files that belong to another user, as after somebody once started the proxy as root."""
    owner = path.stat().st_uid
    others = [item for item in (*path.iterdir(), *path.glob("journal/*")) if item.lstat().st_uid != owner]
    if not others:
        return []
    return [fault("permissions", f"{len(others)} files under {path} are another user's, such as {others[0]}",
                   f"chown -R --reference={path} {path}")]


def _journal(path: Path) -> list[Finding]:
    """A journal whose segments a start would not all find, if a proxy has begun one."""
    folder = folder_of(path)
    if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        return [fault("journal", f"this user may not look into {folder}", AS_ITS_USER)]
    try:
        refuse_lost(path)
    except JournalDamaged as error:
        said, _, advice = error.message.partition(": ")
        return [fault("journal", said, advice)]
    return [ok("journal", "nothing of it is missing")] if has_journal(path) else []


def _keys(path: Path) -> list[Finding]:
    """The secrets that sign keys and the revocations, if a proxy has made them."""
    if not keyring.used(path):
        return []
    try:
        keyring.ring(path)
    except ConfigError as error:
        said, _, advice = str(error).rpartition(": ")
        return [fault("keys", said, advice)]
    except OSError as error:
        return [fault("keys", f"{error.filename} cannot be read: {error.strerror}", AS_ITS_USER)]
    return [ok("keys", "the secret that signs them and what was revoked can be read")]


def _authority(directory: Path) -> list[Finding]:
    """The CA of --intercept, if there is one."""
    check, renew = "interception", f"delete {directory} and restart: programs must then trust the new CA"
    if not directory.exists():
        return []
    found = [fault(check, said, f"chmod it, or {renew}") for said in authority.exposed(directory)]
    try:
        begins, ends = authority.lifetime(directory)
    except (OSError, ValueError) as error:
        return [*found, fault(check, f"the CA's certificate cannot be read: {error}", renew)]
    now = datetime.datetime.now(datetime.UTC)
    if not begins <= now < ends:
        return [*found, fault(check, f"the CA's certificate holds from {begins:%F} to {ends:%F}", renew)]
    if ends - now < RENEWAL:
        return [*found, warning(check, f"the CA's certificate ends on {ends:%F}", renew)]
    return [*found, ok(check, f"the CA's certificate holds until {ends:%F}")]


def _disk(path: Path) -> Finding:
    free = shutil.disk_usage(path).free
    text = f"{free / 2**30:.1f} GiB free under {path}"
    if free < LOW_DISK:
        return fault("disk", text, "free some space: the proxy refuses calls while it cannot write")
    return ok("disk", text)


def _retention(config: Config) -> list[Finding]:
    """An archive that nothing keeps from growing."""
    if config.archive_max_age or config.archive_max_bytes or config.max_disk:
        return []
    return [warning("retention", "by the settings given here the archive grows until the disk is full",
                     "set archive_max_bytes or archive_max_age, and max_disk above them: docs/explain/journal.md says "
                     "what an episode takes")]


def _running(config: Config) -> list[Finding]:
    """A proxy on this data directory, or what keeps one from listening."""
    lock, said = Path(config.data_dir, "lock"), "no proxy is running on this data directory"
    try:
        with lock.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        said = "no proxy has used this data directory yet"
    except BlockingIOError:
        return [ok("lock", "a proxy is running on this data directory; a second one would be refused")]
    except PermissionError:
        return [fault("lock", f"this user may not open {lock}", AS_ITS_USER)]
    taken = ((port, who) for _, port in config.listening if port and (who := listener(port)))
    remedy = "stop it, or give another address (--listen, --intercept)"
    return [ok("lock", said), *(fault("port", f"{who} listens on port {port}", remedy) for port, who in taken)]


async def _upstreams(config: Config) -> list[Finding]:
    if not config.upstream:
        return [warning("upstream", "none configured: requests wait until a trainer announces its engines",
                         "give --upstream URL if an engine is already there")]
    headers = {"Authorization": f"Bearer {config.upstream_key}"} if config.upstream_key else {}
    timeout = aiohttp.ClientTimeout(total=60, connect=10)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        engines = [EngineChecks(session, base_url(url), config) for urls in config.upstreams.values() for url in urls]
        return [finding for engine in engines for finding in await engine.examine()]
