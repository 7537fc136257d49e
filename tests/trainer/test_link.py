from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgpack
import pytest

from ajet_sdk import routes
from ajet_sdk.errors import AjetError, Conflict, Forbidden, NotFound, NotReady, ProxyUnreachable, TooLarge
from ajet_sdk.frame import VERSION, FrameError, decode_batch, encode_batch
from ajet_sdk.headers import HEADER_WIRE
from ajet_trainer import link as link_module
from ajet_trainer.config import Config
from ajet_trainer.link import Link, WireVersion
from tests.trainer.making import batch


class Clock:
    """Time that passes only while someone sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def link(handler: Callable[[httpx.Request], httpx.Response], clock: Clock, **options: object) -> Link:
    transport = httpx.MockTransport(handler)
    return Link("http://proxy:1/", transport=transport, clock=clock, sleep=clock.sleep, **options)  # type: ignore[arg-type]


Asked = list[tuple[str, str, Any]]
"""Requests: their methods, their paths, and their bodies."""


def answering(said: Any = None, status: int = 200) -> tuple[Asked, Callable[[httpx.Request], httpx.Response]]:
    """All that a proxy was asked which answers so, and how it does."""
    asked: Asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        asked.append((request.method, request.url.path.removeprefix("/ajet/v1"), body))
        return httpx.Response(status, json=said or {})

    return asked, handler


def unreachable(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_a_figure_that_nothing_depends_on_is_asked_once() -> None:
    clock, asked = Clock(), list[httpx.Request]()

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        raise httpx.ReadTimeout("frozen")

    assert (link(handler, clock).busy_s(), link(handler, clock).waits_for()) == (None, None)
    assert len(asked) == 2 and asked[0].extensions["timeout"]["read"] == link_module.BUSY_ANSWER_S


def test_a_batch_is_leased_over_the_wire_with_version_and_key() -> None:
    seen: list[httpx.Request] = []
    sent = batch("b1")

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=encode_batch(sent))

    ask = routes.Lease(groups=2, group_size=4, model="policy", wait_s=2.0, lease_s=60.0)
    assert link(handler, Clock(), key="ajet-k").lease(ask) == decode_batch(encode_batch(sent))
    assert seen[0].url == "http://proxy:1/ajet/v1/batches/lease"
    assert seen[0].headers["authorization"] == "Bearer ajet-k"
    assert seen[0].headers[HEADER_WIRE] == str(VERSION)
    assert json.loads(seen[0].content) == {
        "groups": 2,
        "group_size": 4,
        "model": "policy",
        "wait_s": 2.0,
        "lease_s": 60.0,
    }
    assert seen[0].extensions["timeout"]["read"] == 32.0


def test_nothing_ready_is_no_batch() -> None:
    assert link(lambda _: httpx.Response(204), Clock()).lease(routes.Lease()) is None


def test_every_message_has_its_route_and_body() -> None:
    seen, handler = answering({"models": {}})
    one = link(handler, Clock())
    one.ack("b/1", 3)
    one.ack("b1", 3, {"e": "why"})
    one.nack("b1")
    one.extend("b1", 30.0)
    one.close_gate("weights", 5.0)
    one.open_gate(4)
    one.announce("policy", 4)
    one.announce("policy", 4, ["http://e"])
    one.direct(routes.SetMix({"a": 1.0}, ahead=2))
    one.evaluate("policy", 4, "e")
    assert one.evaluation("e") == {"models": {}}
    one.meet()
    assert seen == [
        ("POST", "/batches/b/1/ack", {"policy_version": 3}),
        ("POST", "/batches/b1/ack", {"policy_version": 3, "filtered": {"e": "why"}}),
        ("POST", "/batches/b1/nack", {}),
        ("POST", "/batches/b1/extend", {"lease_s": 30.0}),
        ("POST", "/gate/close", {"wait_s": 5.0}),
        ("POST", "/gate/open", {"policy_version": 4}),
        ("POST", "/policy", {"model": "policy", "version": 4}),
        ("POST", "/policy", {"model": "policy", "version": 4, "upstreams": ["http://e"]}),
        ("PUT", "/mix", {"shares": {"a": 1.0}, "ahead": 2}),
        ("POST", "/evaluations", {"model": "policy", "episodes": 4, "id": "e"}),
        ("GET", "/evaluations/e", None),
        ("GET", "/status", None),
        ("POST", "/batches/none/extend", {"lease_s": 1.0}),
    ]


def test_what_fails_on_the_way_is_tried_again_with_growing_pauses() -> None:
    answers = [503, None, 429, 500, 200]
    clock = Clock()

    def handler(request: httpx.Request) -> httpx.Response:
        status = answers.pop(0)
        if status is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(status, headers={"Retry-After": "3"} if status == 429 else {}, json={})

    link(handler, clock).ack("b", 1)
    assert answers == []
    assert clock.pauses == [0.1, 0.2, 3.0, 0.8]


def test_the_deadline_ends_the_trying() -> None:
    clock = Clock()
    with pytest.raises(ProxyUnreachable, match=r"no answer from http://proxy:1/ajet/v1/batches/b/ack: refused"):
        link(unreachable, clock, deadline_s=10.0).ack("b", 1)
    assert 5.0 < clock.now <= 10.0


def test_closing_the_gate_is_asked_again_until_the_drain_limit() -> None:
    clock, body = Clock(), {"error": {"message": "2 calls are still in flight", "type": "not_ready_error"}}
    _, handler = answering(body, 503)
    with pytest.raises(NotReady, match="still in flight"):
        link(handler, clock, deadline_s=1.0).close_gate("weights", 20.0)
    assert clock.now > 15


@pytest.mark.parametrize(("status", "kind"), [(404, NotFound), (409, Conflict)])
def test_a_refusal_is_not_repeated(status: int, kind: type[Exception]) -> None:
    clock = Clock()
    with pytest.raises(kind, match="gone"):
        link(lambda _: httpx.Response(status, json={"error": {"message": "gone"}}), clock).ack("b", 1)
    assert clock.pauses == []


def test_a_first_meeting_shows_whether_the_key_is_a_trainers() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = {"error": {"message": "this key is of scope agent"}}
        return httpx.Response(200 if request.method == "GET" else statuses.pop(), json=body)

    statuses = [403, 404]
    link(answer, Clock()).meet()
    with pytest.raises(Forbidden, match="http://proxy:1: this key is of scope agent"):
        link(answer, Clock()).meet()


def test_a_first_meeting_with_nobody_says_what_to_look_at() -> None:
    clock, said = Clock(), r"/status: refused\. Is ajet-proxy running, and is proxy_url its address\?"
    with pytest.raises(ProxyUnreachable, match=said):
        link(unreachable, clock, deadline_s=60.0).meet()
    assert 50.0 < clock.now <= 60.0


def test_a_trainer_comes_and_begins_and_hears_that_it_was_replaced() -> None:
    seen: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/trainers"):
            seen.append(json.loads(request.content).get("says", "beats"))
        if seen and seen[-1] == "beats":
            return httpx.Response(409, json=Conflict("another one", code="other_trainer").to_body())
        return httpx.Response(200, json={"discarded": 3, "void": 1})

    one = link(handler, Clock(), trainer=routes.Attend("policy", "run", "me", host="h", folder="/f"))
    one.meet()
    assert one.says("begins") == {"discarded": 3, "void": 1}
    with pytest.raises(Conflict, match="another one"):
        one.check()
    assert seen == ["comes", "begins", "beats"]


def test_the_link_of_a_configuration_has_its_key_and_waits_as_long_as_said() -> None:
    one = Link.of(Config(proxy_url="http://a/", key="k\n", model_name="planner"), deadline_s=7.0)
    assert (one.url, one.deadline_s, one._http.headers["authorization"]) == ("http://a", 7.0, "Bearer k")
    assert "authorization" not in Link.of(Config())._http.headers


def test_the_gate_and_the_busy_time_are_those_of_the_model() -> None:
    told = {"requests": {"busy_s": 9.0}, "models": {"planner": {"busy_s": 2.5}}, "not_resumed": ["no answer"]}
    seen, handler = answering(told)
    mine = link(handler, Clock(), model="planner")
    mine.close_gate("weights", 5.0)
    assert mine.open_gate(4) == ["no answer"]
    bodies = [body for _, _, body in seen]
    assert bodies == [{"wait_s": 5.0, "model": "planner"}, {"policy_version": 4, "model": "planner"}]
    assert (mine.busy_s(), link(handler, Clock(), model="coder").busy_s()) == (2.5, None)


@pytest.mark.parametrize(("says", "knows"), [
    ({}, (True, True)), ({"policy_version": 3}, (False, False)), ({"gate": "closed"}, (False, False)),
    ({"upstreams": []}, (True, False)),
])  # fmt: skip
def test_a_proxy_that_knows_what_serves_is_told_nothing(says: dict[str, Any], knows: tuple[bool, bool]) -> None:
    told = {"models": {"planner": {"policy_version": 4, "gate": "open", "upstreams": ["http://e"]} | says}}
    answers = link(lambda _: httpx.Response(200, json=told), Clock(), model="planner")
    assert (answers.knows(4, None), answers.knows(4, ["http://e"])) == knows
    assert answers.knows(4, None, is_open=False) is ("policy_version" not in says)
    assert link(lambda _: httpx.Response(200, json=told), Clock(), model="coder").knows(4, None) is False
    assert link(lambda _: httpx.Response(503, json={}), Clock(), model="planner").knows(4, None) is None


def test_for_whom_the_model_waits_stands_in_the_status() -> None:
    team = {"planner": {"updates": 5, "waits_for": "coder"}, "coder": {"updates": 3}}
    told = {"teams": [{"other": {"updates": 1}}, team]}
    answers = link(lambda _: httpx.Response(200, json=told), Clock(), model="planner")
    assert answers.waits_for() == ("coder", 2)
    assert link(lambda _: httpx.Response(200, json=told), Clock(), model="coder").waits_for() is None
    assert link(lambda _: httpx.Response(200, json={}), Clock(), model="coder").waits_for() is None


def test_what_is_played_of_the_model_stands_in_its_mix() -> None:
    lanes = {"": {"open": 1, "ready": 2, "share": 0.0}, "math": {"open": 3, "ready": 4, "share": 0.0}}
    told: dict[str, Any] = {"lanes": lanes, "shares": {}}
    asked = list[str]()

    def tells(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(200, json=told)

    assert link(tells, Clock(), model="a b").played() == (6, 4, {}) and asked[0].endswith("/mix?model=a+b")
    assert link(lambda _: httpx.Response(503, json={}), Clock(), model="coder").played() is None
    lanes["math"]["share"], told["shares"] = 1.0, {"math": 1.0}
    assert link(tells, Clock(), model="a b").played() == (4, 3, {"": 3})


def test_an_answer_that_is_no_json_is_still_an_error_of_its_status() -> None:
    with pytest.raises(NotFound, match="HTTP 404: <html>"):
        link(lambda _: httpx.Response(404, text="<html>"), Clock()).nack("b")


def test_another_wire_version_says_what_to_do() -> None:
    frame = msgpack.packb({**msgpack.unpackb(encode_batch(batch("b"))), "version": 7})
    with pytest.raises(WireVersion, match="install the same ajet release on both sides"):
        link(lambda _: httpx.Response(200, content=frame), Clock()).lease(routes.Lease())


def test_an_episode_that_cannot_be_read_comes_with_its_fault() -> None:
    body = msgpack.unpackb(encode_batch(batch("b")))
    body["groups"][0]["tree"]["parents"] = []
    leased = link(lambda _: httpx.Response(200, content=msgpack.packb(body)), Clock()).lease(routes.Lease())
    assert leased is not None
    faults = [one.fault for group in leased.groups for one in group.episodes]
    assert len(leased.groups[0].episodes) == sum("group 0: tree: its runs have 0 nodes" in str(one) for one in faults)


def test_a_truncated_frame_names_itself() -> None:
    with pytest.raises(FrameError, match="truncated"):
        link(lambda _: httpx.Response(200, content=encode_batch(batch("b"))[:50]), Clock()).lease(routes.Lease())


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize("declared", [True, False])
def test_an_answer_that_is_too_large_is_read_no_further(
    status: int, declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is it asked for again, since it would be as large."""
    monkeypatch.setattr(link_module, "MAX_FRAME_BYTES", 100)
    clock, sent = Clock(), list[int]()

    def body() -> Iterator[bytes]:
        for number in range(100):
            sent.append(number)
            yield b"x" * 40

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"Content-Length": "4000"} if declared else {}, content=body())

    with pytest.raises(TooLarge, match=r"http://proxy:1 answers with more than the 100 bytes .* the same ajet release"):
        link(handler, clock).lease(routes.Lease())
    assert sent == ([] if declared else [0, 1, 2])
    assert clock.pauses == []


def test_what_breaks_off_in_the_middle_is_asked_again() -> None:
    sent, answers = encode_batch(batch("b")), [1, 0]

    def body(lacking: int) -> Iterator[bytes]:
        yield sent[:50]
        if lacking:
            raise httpx.ReadError("reset")
        yield sent[50:]

    clock = Clock()
    found = link(lambda _: httpx.Response(200, content=body(answers.pop(0))), clock).lease(routes.Lease())
    assert found == decode_batch(sent)
    assert clock.pauses == [0.1]


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT is Linux's")
def test_the_system_gives_up_sending_before_the_trainer_does() -> None:
    """Else an outage of the network would deliver an old word to the gate, minutes late (tests/e2e/test_hosts.py)."""

    def serve() -> None:
        asked, _ = server.accept()
        with asked:
            asked.recv(10_000)
            asked.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        made = Link(f"http://127.0.0.1:{server.getsockname()[1]}", answer_s=10.0)
        with made._http.stream("GET", "/status") as answer:
            way = answer.extensions["network_stream"].get_extra_info("socket")
            assert way.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
        made.close()
        thread.join()


@pytest.mark.parametrize("page", [b"<html>", b"[]", b"3", b"[" * 100_000])
def test_a_good_answer_that_is_no_object_is_not_of_a_proxy(page: bytes) -> None:
    """proxy_url may name any web server, and one may stand before a proxy that starts."""
    asked = link(lambda request: httpx.Response(200, content=page), Clock(), model="m")
    for ask in (asked.meet, lambda: asked.evaluation("e"), lambda: asked.let_go(1)):
        with pytest.raises(AjetError, match="an ajet proxy does not answer like this: is its address right"):
            ask()
    assert asked.busy_s() is asked.knows(1, None) is asked.waits_for() is asked.played() is None
