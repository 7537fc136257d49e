"""The interceptor's CA on disk: nobody else may read its key, and what programs must trust holds no key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ajet_proxy.io.intercept import authority
from ajet_proxy.io.intercept.authority import AuthorityError
from tests.proxy.io.intercepting import intercepting


async def test_the_key_is_the_owners_alone_and_the_bundle_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs.pem"
    theirs.write_text("-----BEGIN CERTIFICATE-----\nsystem\n-----END CERTIFICATE-----\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(theirs))
    before = os.umask(0)
    try:
        async with intercepting(tmp_path / "ca"):
            pass
    finally:
        os.umask(before)
    ca = tmp_path / "ca"
    assert ca.stat().st_mode & 0o777 == 0o700
    for name in authority.PRIVATE:
        assert (ca / name).stat().st_mode & 0o777 == 0o600
    holding = {path.name for path in ca.iterdir() if b"PRIVATE KEY" in path.read_bytes()}
    assert holding == {authority.KEY}
    bundle = (ca / authority.BUNDLE).read_bytes()
    assert bundle == theirs.read_bytes() + authority.certificate(ca)
    assert b"PRIVATE" not in authority.certificate(ca)
    begins, ends = authority.lifetime(ca)
    assert (ends - begins).days > 365


@pytest.mark.parametrize("name", authority.PRIVATE)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_reach_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    ca = tmp_path / "ca"
    authority.prepare(ca)
    (ca / name).write_text("secret")
    (ca / name).chmod(mode)
    with pytest.raises(AuthorityError, match=f"others can read the CA's key in {ca / name}"):
        authority.prepare(ca)
    (ca / name).chmod(0o600)
    authority.prepare(ca)


def test_a_link_in_place_of_the_key_is_refused(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    authority.prepare(ca)
    (ca / authority.KEY).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuthorityError):
        authority.prepare(ca)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    ca = tmp_path / "ca"
    authority.prepare(ca)
    ca.chmod(mode)
    with pytest.raises(AuthorityError, match="others can write"):
        authority.prepare(ca)
    ca.chmod(0o755)  # the files in it are still their owner's
    authority.prepare(ca)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away: run as root")
def test_another_owners_key_is_refused(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    authority.prepare(ca)
    (ca / authority.KEY).write_text("secret")
    (ca / authority.KEY).chmod(0o600)
    os.chown(ca / authority.KEY, 65534, 65534)
    with pytest.raises(AuthorityError):
        authority.prepare(ca)
