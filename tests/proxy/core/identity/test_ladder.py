"""Who asks, for which episode, with what riding on the request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.identity.headers import Headers
from ajet_proxy.core.identity.keys import Claims, Keys
from ajet_proxy.core.identity.ladder import MAX_SESSION, Identity, identify, key_of, split_path
from ajet_sdk.errors import BadRequest, Forbidden, Unauthorized

OPEN = Keys(b"s" * 32)
CLOSED = Keys(b"s" * 32, admin_secret="a-long-admin-secret")
OWN = OPEN.issue(Claims("agent", "t1", "ep-own", 100.0))
TENANT = OPEN.issue(Claims("agent", "t1", None, 100.0))
TRAINER = OPEN.issue(Claims("trainer"))
PATH = "/v1/chat/completions"


def ask(
    path: str = PATH, headers: Mapping[str, str] | None = None, body: Any = None, keys: Keys = OPEN,
    key: str | None = None,
) -> Identity:
    all_headers = {**({"authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
    read = Headers(all_headers)
    claims = keys.authenticate(key_of(path, read), 50.0)
    return identify(path=path, headers=read, body=body, claims=claims)


def test_the_six_ways_in_their_order() -> None:
    body = {"prompt_cache_key": "from-body"}
    harness = {"session-id": "from-harness"}
    header = {"x-ajet-episode": "from-header"}
    cases = [
        (ask(f"/e/from-path{PATH}", header | harness, body), "from-path", "path"),
        (ask(headers=header | harness, body=body, key=OWN), "ep-own", "key"),
        (ask(headers=header | harness, body=body), "from-header", "header"),
        (ask(headers=harness, body=body), "from-harness", "harness"),
        (ask(body=body), "from-body", "body"),
        (ask(body={"model": "m"}), None, "lineage"),
    ]
    for identity, episode, way in cases:
        assert (identity.episode, identity.identified_by, identity.path) == (episode, way, PATH)


@pytest.mark.parametrize("name", ["session-id", "thread-id", "x-claude-code-session-id", "x-session-id"])
def test_every_harness_header_names_an_episode(name: str) -> None:
    assert ask(headers={name: "abc"}).episode == "abc"


@pytest.mark.parametrize(("body", "episode"), [
    ({"prompt_cache_key": "a", "metadata": {"session_id": "b"}, "user": "c"}, "a"),
    ({"metadata": {"session_id": "b", "user_id": "d"}, "user": "c"}, "b"),
    ({"metadata": {"user_id": "d"}, "user": "c"}, "d"),
    ({"metadata": {"user_id": json.dumps({"device_id": "x", "session_id": "sess"})}}, "sess"),
    ({"user": "c"}, "c"),
    ({"user": "c", "metadata": ["no", "map"], "prompt_cache_key": 7}, "c"),
    ({"user": ""}, None),
])  # fmt: skip
def test_names_in_a_body(body: dict[str, Any], episode: str | None) -> None:
    assert ask(body=body).episode == episode


def test_a_user_id_of_any_length_is_not_looked_into() -> None:
    said = {"session_id": "sess", "more": "x" * MAX_SESSION}
    assert ask(body={"metadata": {"user_id": json.dumps(said)}}).episode != "sess"


@pytest.mark.parametrize("user_id", [
    '{"no": "session"}', '{"session_id": 1}', '{"session_id": ""}', "{broken", '{"a":' * 100_000,
])  # fmt: skip
def test_a_user_id_that_only_looks_like_json_is_a_name(user_id: str) -> None:
    assert ask(body={"metadata": {"user_id": user_id}}).episode == user_id


@given(st.text(min_size=1))
def test_a_borrowed_name_may_be_anything(name: str) -> None:
    assert ask(body={"user": name}).episode == name
    assert ask(headers={"session-id": name}).episode == name


def test_an_own_name_must_be_valid() -> None:
    for headers, path in (({"x-ajet-episode": "a b"}, PATH), ({}, "/e/a%20b/v1/models"), ({}, "/e//v1/models")):
        with pytest.raises(BadRequest):
            ask(path, headers)


def test_a_key_in_the_path_stands_for_its_episode() -> None:
    identity = ask(f"/e/{OWN}{PATH}", key="sk-cannot-be-set")
    assert (identity.episode, identity.identified_by, identity.issued) == ("ep-own", "path", True)
    assert identity.path == PATH
    assert identity.claims == Claims("agent", "t1", "ep-own", 100.0)


def test_a_tenants_key_in_the_path_lets_the_next_way_name_the_episode() -> None:
    identity = ask(f"/e/{TENANT}{PATH}", {"x-ajet-episode": "x"}, keys=CLOSED)
    assert (identity.episode, identity.identified_by, identity.issued) == ("x", "header", False)


def test_an_issued_episode_is_known_as_such() -> None:
    assert ask(key=OWN).issued
    assert ask(f"/e/ep-own{PATH}", key=OWN).issued
    assert not ask(f"/e/ep-own{PATH}", key=TENANT).issued


def test_an_episodes_key_opens_no_other() -> None:
    with pytest.raises(Forbidden):
        ask(f"/e/other{PATH}", key=OWN)


def test_without_a_good_key_there_is_no_way_in() -> None:
    for key in (None, "sk-foreign", "ajet-forged.x"):
        with pytest.raises(Unauthorized):
            ask(f"/e/x{PATH}", keys=CLOSED, key=key)
    with pytest.raises(Unauthorized):
        ask("/e/ajet-forged.x/v1/models")
    assert ask(keys=CLOSED, key="a-long-admin-secret").claims.scope == "admin"


def test_a_trainers_key_makes_no_calls() -> None:
    with pytest.raises(Forbidden):
        ask(key=TRAINER)


@pytest.mark.parametrize(("path", "named", "rest"), [
    ("/v1/models", None, "/v1/models"),
    ("/e/x/v1/models", "x", "/v1/models"),
    ("/e/a%3Ab/v1/chat%2f", "a:b", "/v1/chat%2f"),
    ("/e/x", "x", ""),
    ("/e/", "", ""),
    ("/else", None, "/else"),
])  # fmt: skip
def test_paths(path: str, named: str | None, rest: str) -> None:
    assert split_path(path) == (named, rest)


@pytest.mark.parametrize("eval", [False, True])
@pytest.mark.parametrize(("claims", "header", "lane", "consents"), [
    (Claims("agent"), "1", "", True), (Claims("agent", lanes=("chat",)), None, "chat", False),
    (Claims("agent", lanes=("chat",)), "1", "chat", True), (Claims("agent", lanes=("chat",)), "0", "chat", False),
    (Claims("agent", lanes=("chat",), always=True), None, "chat", True),
])  # fmt: skip
def test_what_opens_as_traffic(claims: Claims, header: str | None, lane: str, consents: bool, eval: bool) -> None:
    """Without consent it is withdrawn at once. An evaluation of which nothing is said is one as ever."""
    sent = ({} if header is None else {"x-ajet-traffic": header}) | ({"x-ajet-eval": "1"} if eval else {})
    asked = ask(key=OPEN.issue(claims), headers=sent)
    assert asked.traffic == ("" if eval and header is None and not claims.always else lane)
    assert asked.consents is consents
    assert asked.labels.traffic is {None: None, "1": True, "0": False}[header]


def test_a_daemon_s_lane_is_that_of_requests_without_a_key() -> None:
    keys = Keys(b"s" * 32, traffic="chat")
    assert ask(keys=keys).traffic == "chat"
    assert ask(keys=keys, key=TENANT).traffic == ""
