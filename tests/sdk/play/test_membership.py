"""A process that runs agents is a client: it joins, beats, leaves, and comes back."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

import ajet_sdk
from ajet_sdk import aio, errors, routes
from ajet_sdk.blocking import wait
from ajet_sdk.client import Client, Target
from ajet_sdk.play import membership
from ajet_sdk.play.membership import Membership, own_name
from ajet_sdk.play.program import Program, run_program
from ajet_sdk.play.revision import of_agent
from tests.kit.control_stub import DROP, ControlStub, Say
from tests.kit.patience import reached, until
from tests.kit.ports import free_port


@pytest.fixture
def stub(stub: ControlStub) -> ControlStub:
    """The proxy, which hears clients here."""
    stub.hears_clients = True
    return stub


def joined(stub: ControlStub) -> list[dict[str, Any]]:
    return list(stub.clients.values())


def forget(stub: ControlStub) -> None:
    """All clients are silent, as after a network that was away."""
    for one in joined(stub):
        one["state"] = "gone"
    for record in stub.episodes.values():
        if record["state"] == "open":
            record.update(state="discarded", reason="client_gone")


async def rewarding(_task: Any, _episode: Any) -> float:
    return 1.0


async def test_a_run_joins_and_leaves_and_its_episodes_say_who_plays_what(stub: ControlStub) -> None:
    results = await aio.run(rewarding, ["a", "b"], repeat=2, client_name="mine", lane="math", revision="r1")
    assert len(results.rewards) == 4
    (client,) = joined(stub)
    assert (client["name"], client["lane"], client["revision"], client["state"]) == ("mine", "math", "r1", "gone")
    assert {(one["client"], one["revision"]) for one in stub.episodes.values()} == {(client["client"], "r1")}
    assert stub.count("DELETE", client["client"]) == 1


async def test_unnamed_runs_never_share_a_name_and_their_revision_is_of_the_agents_file(stub: ControlStub) -> None:
    for _ in range(2):
        await aio.run(rewarding, ["a"], repeat=1)
    first, second = joined(stub)
    assert first["name"] != second["name"]
    assert [one["state"] for one in joined(stub)] == ["gone", "gone"]
    assert {len(one["revision"]) for one in (*joined(stub), *stub.episodes.values())} == {16}


async def test_a_function_that_is_loaded_stays_what_it_is_though_its_file_changes(
    stub: ControlStub, tmp_path: Path
) -> None:
    path = tmp_path / "player.py"
    path.write_text("async def agent(task, episode):\n    return 1.0\n")
    loaded: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), loaded)

    async def edited(task: Any, episode: Any) -> float:
        path.write_text(path.read_text() + "# more\n")
        return float(await loaded["agent"](task, episode))

    edited.__wrapped__ = loaded["agent"]  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ajet_sdk.play.rollouts.of_agent", lambda agent: of_agent(edited))
        await aio.run(edited, ["a", "b"], repeat=2, parallel=1)
    (revision,) = {one["revision"] for one in stub.episodes.values()}
    assert revision != of_agent(edited)()


async def test_joining_is_tried_again_as_long_as_opening_is(stub: ControlStub) -> None:
    stub.faults.extend([Say(503), "lose", "drop"])
    results = await aio.run(rewarding, ["a"], repeat=2, parallel=1)
    assert len(results.rewards) == 2
    assert len(joined(stub)) == 1


async def test_without_a_proxy_every_rollout_fails_and_all_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AJET_PROXY_URL", f"http://127.0.0.1:{free_port()}")
    tries: list[str] = []
    attempt = Client.attempt

    async def counted(self: Any, send: Any) -> Any:
        tries.append(send.url)
        return await attempt(self, send)

    monkeypatch.setattr(Client, "attempt", counted)
    results = await aio.run(rewarding, ["a"], repeat=4, parallel=4, deadline=0.0)
    assert [(item.outcome, item.episode) for item in results] == [("failed", None)] * 4
    assert all("no proxy acknowledged" in (item.reason or "") for item in results)
    assert len(tries) <= 4 and {url.rpartition("/")[2] for url in tries} == {"clients"}


async def test_a_client_that_was_taken_for_gone_joins_again_and_its_rollout_is_the_worlds_failure(
    stub: ControlStub
) -> None:
    async def agent(task: str, _episode: Any) -> float:
        if task == "away" and not gone:
            gone.append(task)
            forget(stub)
        return 1.0

    gone: list[str] = []
    results = await aio.run(agent, ["before", "away", "after"], repeat=1, parallel=1)
    assert [(item.task, item.ok, item.infra, item.again) for item in results] == [
        ("before", True, False, False), ("away", False, True, True),
        ("after", True, False, False), ("away", True, False, False),
    ]  # fmt: skip
    assert not results.failures
    assert results[1].discarded == "client_gone"
    first, second = joined(stub)
    assert (second["replaces"], second["name"]) == (False, first["name"])
    assert [one["client"] for one in stub.episodes.values()] == [first["client"]] * 2 + [second["client"]] * 2


async def test_a_client_whose_name_another_has_taken_ends(stub: ControlStub) -> None:
    played: list[str] = []

    async def agent(task: str, _episode: Any) -> float:
        played.append(task)
        if task == "b":
            forget(stub)
            with ajet_sdk.Client() as other:
                other.ask("join", routes.Join("mine"))
        return 1.0

    with pytest.raises(errors.Conflict) as caught:
        await aio.run(agent, [*"abcdefgh"], repeat=1, parallel=1, client_name="mine")
    assert caught.value.code == "client_exists"
    assert played == ["a", "b"]


async def test_one_that_is_gone_however_often_it_joins_is_no_endless_loop(stub: ControlStub) -> None:
    opened: list[Any] = []

    def gone(body: routes.OpenEpisode) -> dict[str, Any]:
        opened.append(body.client)
        forget(stub)
        raise errors.Conflict("it is gone", code="client_gone")

    stub.open_episode = gone  # type: ignore[method-assign]
    results = await aio.run(rewarding, ["a"], repeat=1)
    assert [item.outcome for item in results] == ["failed"]
    assert len(set(opened)) == membership.OPENINGS


@pytest.mark.parametrize(
    ("given", "param"),
    [({"client_name": ""}, "name"), ({"replace_older": True}, "lane"),
     *(({"lane": one}, "lane") for one in ("x" * 201, "x/y"))],
)  # fmt: skip
async def test_what_no_client_can_be_is_refused_before_anything_begins(
    stub: ControlStub, given: Any, param: str
) -> None:
    with pytest.raises(errors.BadRequest) as caught:
        await aio.run(rewarding, ["a"], **given)
    assert caught.value.param == param
    assert not stub.heard


async def test_it_beats_by_itself_and_notices_when_it_is_gone(stub: ControlStub) -> None:
    with ajet_sdk.join("mine", ttl_s=0.03) as member:
        await reached(lambda: joined(stub)[0]["beats"] > 1)
        forget(stub)
        await reached(lambda: len(joined(stub)) == 2 and joined(stub)[1]["beats"] > 0)
        assert member.id == joined(stub)[1]["client"]
    assert joined(stub)[1]["state"] == "gone"


async def test_it_beats_and_joins_again_while_the_event_loop_is_blocked(stub: ControlStub) -> None:
    async with aio.join("mine", ttl_s=0.03) as member:
        assert until(lambda: joined(stub)[0]["beats"] > 1)
        forget(stub)
        assert until(lambda: len(joined(stub)) == 2 and joined(stub)[1]["beats"] > 0)
        assert member.id == joined(stub)[1]["client"]
    assert joined(stub)[1]["state"] == "gone"


def test_a_beat_that_gets_no_answer_is_no_end(stub: ControlStub) -> None:
    with ajet_sdk.join("a", ttl_s=1000.0) as member:
        member.beat()
        stub.faults.append(Say(403))
        with pytest.raises(errors.AjetError):
            member.beat()
        member.beat()
        assert joined(stub)[-1]["beats"] == 2
    assert joined(stub)[-1]["state"] == "gone"


def test_joining_by_hand(stub: ControlStub) -> None:
    with ajet_sdk.join("mine", lane="math", revision="r1", ttl_s=60.0) as me, ajet_sdk.episode("t", client=me.id) as ep:
        ep.reward(1.0)
    assert [one["client"] for one in stub.episodes.values()] == [me.id]
    assert (joined(stub)[0]["ttl_s"], joined(stub)[0]["lane"], joined(stub)[0]["state"]) == (60.0, "math", "gone")
    stub.faults.append(Say(403))
    with pytest.raises(errors.Forbidden):
        ajet_sdk.join()


async def test_an_id_whose_answer_was_lost_for_its_whole_time_is_given_up(stub: ControlStub) -> None:
    member = Membership(Target(stub.url, deadline=0.0), routes.Join("mine"))
    stub.faults.append("lose")
    with pytest.raises(errors.ProxyUnreachable):
        await member.join()
    forget(stub)
    await member.join()
    assert [one["state"] for one in joined(stub)] == ["gone", "joined"]
    await member.leave()


async def test_many_openings_join_once(stub: ControlStub) -> None:
    member = Membership(Target(stub.url), routes.Join("mine"))
    await asyncio.gather(*(member.open(routes.OpenEpisode()) for _ in range(16)))
    await member.leave()
    assert (stub.count("POST", "/clients"), len(stub.episodes)) == (1, 16)


def test_one_whose_name_another_has_taken_does_not_come_back(stub: ControlStub) -> None:
    with ajet_sdk.join("mine", ttl_s=1000.0) as member, ajet_sdk.join("mine", ttl_s=1000.0) as other:
        for leave in (lambda: None, other.leave):
            leave()
            with pytest.raises(errors.Conflict) as caught:
                member.beat()
            assert caught.value.code == "client_exists"


def test_the_revision_follows_the_file_while_a_program_runs(stub: ControlStub, tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text("exit 0\n")

    def edit(_result: Any) -> None:
        script.write_text(f"{script.read_text()}# more\n")

    run_program(
        Program(["sh", str(script)], reward_from="exit-code"), ["t"], repeat=3, on_result=edit, client_name="mine"
    )
    assert len({one["revision"] for one in stub.episodes.values()}) == 3
    assert joined(stub)[0]["name"] == "mine"


def test_a_client_that_was_given_no_name_has_one_that_is_short_enough() -> None:
    name = own_name("/usr/bin/" + "x" * 300)
    assert len(name) <= 200 and ":" in name
    assert own_name("agent.py").split(":")[1].startswith("agent.py-")


class Asked:
    """A proxy that is asked to join, and fails when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.member = Membership(Target("http://127.0.0.1:9"), routes.Join("mine", None, None, 30.0))
        self.begun, self.fails = threading.Event(), threading.Event()
        monkeypatch.setattr(membership.Client, "ask", self.ask)

    async def ask(self, *_: Any, **__: Any) -> None:
        self.begun.set()
        while not self.fails.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        raise errors.ProxyUnreachable("away")


def test_who_waits_to_join_while_the_client_leaves_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, caught = Asked(monkeypatch), list[BaseException]()

    def join() -> None:
        try:
            wait(proxy.member.join())
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    assert proxy.begun.wait(300)
    wait(proxy.member.leave())
    thread.join(300)
    assert [getattr(error, "code", None) for error in caught] == ["client_gone"]


def test_a_join_that_fails_when_nobody_waits_any_more_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Asked(monkeypatch)

    async def gives_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(proxy.member.join(), 0.05)
        proxy.fails.set()
        await asyncio.sleep(0.1)
        gc.collect()

    wait(gives_up())
    assert not caplog.records
    wait(proxy.member.leave())


async def test_a_say_that_raises_ends_the_run_and_no_beats(stub: ControlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr(membership, "BEATS", 600)
    stub.says = lambda heard: DROP if heard.path.endswith("/beat") and not told.is_set() else None

    def say(line: str) -> None:
        told.set()
        raise ZeroDivisionError(line)

    async def agent(_task: Any, _episode: Any) -> float:
        await reached(told.is_set)
        beats = stub.count("POST", "/beat")
        await reached(lambda: stub.count("POST", "/beat") > beats + 2)
        return 1.0

    with pytest.raises(ZeroDivisionError):
        await aio.run(agent, ["a", "b"], 1, 1, say=say)
    assert len(stub.episodes) == 1
