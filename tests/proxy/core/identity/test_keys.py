"""Keys: what is signed holds, and nothing else does."""

from __future__ import annotations

import base64
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.identity.keys import (
    EVERYTHING,
    SCOPES,
    Claims,
    Keys,
    Ring,
    check_scope,
    holds_key,
    key_id,
    key_in,
    masked,
    proxy_key_in,
)
from ajet_sdk.errors import Forbidden, Unauthorized

SECRET = b"s" * 32
ADMIN = "correct horse battery staple"
claims = st.builds(
    Claims, scope=st.sampled_from(SCOPES), tenant=st.text(max_size=20), episode=st.none() | st.text(max_size=20),
    expires=st.floats(min_value=1, max_value=4e9) | st.just(float("inf")), issued=st.floats(min_value=0, max_value=4e9),
    model=st.text(max_size=20),
)


@given(claims)
def test_an_issued_key_says_its_claims_and_fits_into_a_path(wanted: Claims) -> None:
    key = Keys(SECRET).issue(wanted)
    assert re.fullmatch(r"ajet-[A-Za-z0-9_.-]+", key)
    assert Keys(SECRET).verify(key, now=0.5) == wanted


@given(claims, st.integers(min_value=0), st.integers(min_value=1, max_value=127))
def test_a_changed_key_is_refused(wanted: Claims, where: int, flip: int) -> None:
    keys = Keys(SECRET)
    key = keys.issue(wanted)
    index = where % len(key)
    forged = key[:index] + chr(ord(key[index]) ^ flip) + key[index + 1 :]
    with pytest.raises(Unauthorized):
        keys.verify(forged, now=0.5)


@pytest.mark.parametrize("key", ["", "ajet-", "ajet-.", "ajet-a", "ajet-a.b", "sk-abc", "\udc80", "ajet-\udcff.x", "."])
def test_what_is_no_key_is_refused_in_words_that_do_not_repeat_it(key: str) -> None:
    with pytest.raises(Unauthorized) as caught:
        Keys(SECRET, admin_secret=ADMIN).verify(key, now=0.0)
    assert len(key) < 4 or key not in caught.value.message


def test_a_key_holds_until_it_expires() -> None:
    keys = Keys(SECRET)
    key = keys.issue(Claims("agent", expires=100.0))
    assert keys.verify(key, now=99.9).scope == "agent"
    with pytest.raises(Unauthorized) as caught:
        keys.verify(key, now=100.0)
    assert caught.value.code == "expired_api_key"


@pytest.mark.parametrize("key", [None, "EMPTY", "sk-abc", "anything"])
def test_without_an_admin_secret_a_foreign_key_or_none_may_do_everything(key: str | None) -> None:
    assert Keys(SECRET).authenticate(key, now=0.0) == EVERYTHING


def test_without_an_admin_secret_our_own_keys_are_still_held_to_their_claims() -> None:
    keys = Keys(SECRET)
    assert keys.authenticate(keys.issue(Claims("agent", "t", "e")), now=0.0) == Claims("agent", "t", "e")
    with pytest.raises(Unauthorized):
        keys.authenticate("ajet-forged.key", now=0.0)


@pytest.mark.parametrize("key", [None, "EMPTY", "sk-abc", ADMIN + "x", ADMIN[:-1]])
def test_with_an_admin_secret_a_foreign_key_or_none_is_refused(key: str | None) -> None:
    with pytest.raises(Unauthorized):
        Keys(SECRET, admin_secret=ADMIN).authenticate(key, now=0.0)


def test_who_shows_no_key_is_told_where_ours_take_it_from() -> None:
    with pytest.raises(Unauthorized, match=r"Authorization: Bearer KEY.*AJET_API_KEY") as caught:
        Keys(SECRET, admin_secret=ADMIN).authenticate(None, now=0.0)
    assert caught.value.code == "missing_api_key"


def test_the_admin_secret_is_an_admin_key() -> None:
    assert Keys(SECRET, admin_secret=ADMIN).authenticate(ADMIN, now=0.0) == EVERYTHING


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"authorization": "Bearer a"}, "a"),
        ({"authorization": "bearer  a "}, "a"),
        ({"authorization": "Basic a"}, None),
        ({"authorization": "Bearer "}, None),
        ({"x-api-key": "b"}, "b"),
        ({"authorization": "Bearer a", "x-api-key": "b"}, "a"),
        ({"authorization": "Basic a", "x-api-key": "b"}, "b"),
        ({"authorization": "Bearer sk-a", "x-api-key": "ajet-b"}, "ajet-b"),
        ({"authorization": "Bearer ajet-a", "x-api-key": "ajet-b"}, "ajet-a"),
        ({"x-api-key": " "}, None),
    ],
)
def test_where_a_request_carries_its_key(headers: dict[str, str], key: str | None) -> None:
    assert key_in(headers) == key


@pytest.mark.parametrize(
    ("shown", "key"),
    [
        ("ajet-a.b:", "ajet-a.b"), ("ajet-a.b:anything", "ajet-a.b"), ("ajet-a.b", "ajet-a.b"), ("user:ajet-a.b", None),
        ("user:password", None), ("", None), ("\xe9:x", None),
    ],
)
def test_the_key_in_a_proxys_address(shown: str, key: str | None) -> None:
    encoded = base64.b64encode(shown.encode("latin-1")).decode()
    assert proxy_key_in(f"Basic {encoded}") == key
    assert proxy_key_in(f" bASIC  {encoded} ") == key
    assert proxy_key_in(f"Bearer {encoded}") is None


@pytest.mark.parametrize("header", [None, "", "Basic", "Basic ?", "Basic YWpldA", "ajet-a.b", "Basic \udcff"])
def test_a_proxys_address_without_a_key(header: str | None) -> None:
    assert proxy_key_in(header) is None


def test_scopes() -> None:
    allowed = {
        ("agent", "agent"), ("agent", "any"), ("trainer", "trainer"), ("trainer", "any"),
        ("admin", "agent"), ("admin", "trainer"), ("admin", "admin"), ("admin", "any"),
        ("admin", "operator"), ("operator", "operator"), ("judge", "judge"), ("judge", "any"), ("admin", "judge"),
    }
    for scope in SCOPES:
        for needed in ("agent", "trainer", "operator", "judge", "admin", "any"):
            if (scope, needed) in allowed:
                check_scope(Claims(scope), needed)
            else:
                with pytest.raises(Forbidden):
                    check_scope(Claims(scope), needed)


def test_the_newest_secret_signs_and_the_older_ones_hold() -> None:
    keys = Keys(SECRET)
    old = keys.issue(Claims("agent"))
    keys.ring = Ring((b"new", SECRET))
    assert keys.verify(old, now=0.0) == Claims("agent")
    new = keys.issue(Claims("agent"))
    assert new == Keys(b"new").issue(Claims("agent"))
    keys.ring = Ring((b"new",))
    with pytest.raises(Unauthorized):
        keys.verify(old, now=0.0)


@given(claims, claims, st.floats(min_value=0, max_value=4e9))
def test_a_revocation_reaches_the_keys_it_names_that_were_issued_by_then(one: Claims, two: Claims, at: float) -> None:
    keys = Keys(SECRET, admin_secret=ADMIN)
    first, second = keys.issue(one), keys.issue(two)
    rings = (
        (Ring((SECRET,), keys=frozenset((key_id(first),))), first == second),
        (Ring((SECRET,), tenants={one.tenant: at}), two.tenant == one.tenant and two.issued <= at),
        (Ring((SECRET,), episodes={one.episode or "": at}), two.episode == (one.episode or "") and two.issued <= at),
    )
    for keys.ring, void in rings:
        if void:
            with pytest.raises(Unauthorized) as caught:
                keys.verify(second, now=0.5)
            assert caught.value.code == "revoked_api_key"
        else:
            assert keys.verify(second, now=0.5) == two
        assert keys.verify(ADMIN, now=0.5) == EVERYTHING


def test_a_key_is_named_by_a_hash() -> None:
    key = Keys(SECRET).issue(Claims("agent"))
    assert re.fullmatch("[0-9a-f]{16}", key_id(key))
    assert key_id(key) not in key
    assert key_id("\udc80") != key_id("")


@given(claims, st.text(), st.text())
def test_no_text_quotes_a_key(wanted: Claims, before: str, after: str) -> None:
    key = Keys(SECRET).issue(wanted)
    shown = masked(f"{before} {key} {after}")
    assert key not in shown
    assert key[21:60] not in shown
    assert masked("ajet-proxy: no episode 'ep-0123456789abcdef'") == "ajet-proxy: no episode 'ep-0123456789abcdef'"


@given(claims, st.text(), st.text())
def test_a_key_is_found_wherever_it_stands(wanted: Claims, before: str, after: str) -> None:
    assert holds_key(f"{before}{Keys(SECRET).issue(wanted)}{after}")


@pytest.mark.parametrize("text", [
    "", "ajet-proxy/0.1.0", "ajet-run-with-a-long-name.jsonl", "sk-" + "a" * 60,
    "ajet-" * 1_000_000,  # it would take an hour to look on from each of these to the end
])  # fmt: skip
def test_a_name_that_begins_like_a_key_is_none(text: str) -> None:
    assert not holds_key(text)
