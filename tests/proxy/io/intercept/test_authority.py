"""The interceptor's CA on disk: nobody else may read its key, and what programs must trust holds no key."""

from __future__ import annotations

import os
from collections.abc import Callable
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


def key(name: str, mode: int) -> Callable[[Path], object]:
    """Makes a file of the authority's key, with `mode`."""
    def make(ca: Path) -> None:
        (ca / name).write_text("secret")
        (ca / name).chmod(mode)

    return make


def give_away(ca: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away: run as root")
    key(authority.KEY, 0o600)(ca)
    os.chown(ca / authority.KEY, 65534, 65534)


@pytest.mark.parametrize(("spoil", "words", "mend"), [
    *((key(name, mode), "others can read the CA's key in", key(name, 0o600))
      for name in authority.PRIVATE for mode in (0o640, 0o604, 0o620)),
    (lambda ca: (ca / authority.KEY).symlink_to(ca / "elsewhere"), "others can read", None),
    *((lambda ca, mode=mode: ca.chmod(mode), "others can write to", lambda ca: ca.chmod(0o755))
      for mode in (0o770, 0o702)),
    (give_away, "others can read", None),
])  # fmt: skip
def test_an_authority_that_others_reach_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], words: str, mend: Callable[[Path], object] | None
) -> None:
    ca = tmp_path / "ca"
    authority.prepare(ca)
    spoil(ca)
    with pytest.raises(AuthorityError, match=words):
        authority.prepare(ca)
    if mend is not None:
        mend(ca)
        authority.prepare(ca)
