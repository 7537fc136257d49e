"""The files of secrets and revocations: made once, changed by commands, taken up by a running daemon."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from ajet_proxy.core.identity.keys import Claims, Keys, key_id
from ajet_proxy.io.http import keyring
from ajet_proxy.io.runtime.clock import Clock
from ajet_sdk.errors import Unauthorized
from ajet_sdk.settings import ConfigError
from tests.proxy.serving import eventually, serving


def holds(keys: Keys, key: str) -> bool:
    try:
        keys.verify(key, now=0.0)
    except Unauthorized:
        return False
    return True


def test_the_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    (secret,) = keyring.ring(tmp_path).secrets
    assert len(secret) == 32
    assert keyring.ring(tmp_path).secrets == (secret,)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("file", "data"),
    [("secret", b"short"), ("secret", b""), ("revoked", b"{"), ("revoked", b'["key"]'), ("revoked", b'["x","y",1]'),
     ("revoked", b"\xff"), ("revoked", b"[" * 100_000)],
)
def test_a_damaged_file_is_refused_by_name(file: str, data: bytes, tmp_path: Path) -> None:
    keyring.ring(tmp_path)
    (tmp_path / file).write_bytes(data)
    with pytest.raises(ConfigError, match=f"{file} is damaged"):
        keyring.ring(tmp_path)


def test_keys_outlive_a_rotation_until_the_old_secrets_are_dropped(tmp_path: Path) -> None:
    first = keyring.keys(tmp_path).issue(Claims("agent"))
    assert keyring.rotate(tmp_path, drop_old=False) == 1
    second = keyring.keys(tmp_path).issue(Claims("agent"))
    assert first != second
    assert keyring.rotate(tmp_path, drop_old=False) == 2
    assert holds(keyring.keys(tmp_path), first)
    assert holds(keyring.keys(tmp_path), second)
    assert keyring.rotate(tmp_path, drop_old=True) == 0
    assert not holds(keyring.keys(tmp_path), first)
    assert not holds(keyring.keys(tmp_path), second)
    assert (tmp_path / "secret").stat().st_size == 32
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_what_is_revoked_stays_revoked_and_nothing_else_is(tmp_path: Path) -> None:
    keys = keyring.keys(tmp_path)
    one, other = (keys.issue(Claims("agent", "a", name, issued=5.0)) for name in ("one", "two"))
    team, admin = keys.issue(Claims("agent", "b", issued=5.0)), keys.issue(Claims("admin", issued=5.0))
    keyring.revoke(tmp_path, "key", key_id(admin), 9.0)
    assert [holds(keyring.keys(tmp_path), key) for key in (one, other, team, admin)] == [True, True, True, False]
    keyring.revoke(tmp_path, "episode", "one", 5.0)
    assert [holds(keyring.keys(tmp_path), key) for key in (one, other, team, admin)] == [False, True, True, False]
    keyring.revoke(tmp_path, "tenant", "b", 6.0)
    keyring.revoke(tmp_path, "tenant", "b", 4.0)
    assert [holds(keyring.keys(tmp_path), key) for key in (one, other, team, admin)] == [False, True, False, False]
    assert (tmp_path / "revoked").stat().st_mode & 0o777 == 0o600
    assert holds(keyring.keys(tmp_path), keys.issue(Claims("agent", "b", issued=6.5)))


def test_a_watch_takes_up_changes_and_keeps_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keys = keyring.keys(tmp_path)
    watch, key = keyring.Watch(tmp_path, keys), keys.issue(Claims("agent", "a"))
    watch.tick()
    assert caplog.text == ""
    keyring.rotate(tmp_path, drop_old=True)
    watch.tick()
    assert not holds(keys, key)
    assert "took up" in caplog.text
    kept = keys.ring
    (tmp_path / "secret").unlink()
    for _ in range(2):
        watch.tick()
    assert keys.ring is kept
    assert caplog.text.count("stay as they were") == 1
    assert not any(secret.hex() in caplog.text for secret in kept.secrets)


def test_a_change_that_could_not_be_read_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the daemon has no descriptor left for a moment."""
    keys = keyring.keys(tmp_path)
    watch, key = keyring.Watch(tmp_path, keys), keys.issue(Claims("agent", "a", issued=5.0))
    watch.tick()
    keyring.revoke(tmp_path, "tenant", "a", 6.0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        for _ in range(3):
            watch.tick()
        assert holds(keys, key)
    assert caplog.text.count("Too many open files") == 1
    watch.tick()
    assert not holds(keys, key)


@pytest.mark.parametrize("set_since", [3600.0, -3600.0])
async def test_a_clock_that_was_set_since_the_start_revokes_what_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_since: float
) -> None:
    monkeypatch.setattr(Clock, "now", lambda clock: time.time() - set_since)
    async with serving(tmp_path, admin_secret="a secret of the operator") as client:

        async def opened() -> tuple[str, str]:
            key = client.key(Claims("agent", "t", issued=time.time()))
            answer = (await client.control("POST", "/episodes", {}, key=key)).json
            return answer["api_key"], answer["episode"]

        async def heard(key: str, episode: str) -> int:
            return (await client.control("POST", f"/episodes/{episode}/heartbeat", {}, key=key)).status

        old = await opened()
        assert await heard(*old) == 200
        keyring.revoke(tmp_path, "tenant", "t", time.time())

        async def revoked() -> bool:
            return await heard(*old) == 401

        await eventually(revoked)
        refused = await client.control("GET", "/status", key=old[0])
        assert refused.json["error"]["code"] == "revoked_api_key"
        assert await heard(*await opened()) == 200


async def test_a_running_daemon_needs_no_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_secret="a secret of the operator") as client:
        key = client.key(Claims("agent", "a"))

        async def answer_is(status: int, key: str) -> bool:
            return (await client.control("GET", "/status", key=key)).status == status

        assert await answer_is(200, key)
        keyring.rotate(tmp_path, drop_old=False)
        young = client.key(Claims("agent", "b"))
        await eventually(lambda: answer_is(200, young))
        assert await answer_is(200, key)
