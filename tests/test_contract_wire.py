"""The pages of the contract are held to the code: answers, records, the wire, variables and limits."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgpack

from ajet_proxy.core.control.episodes import MAX_RECORDS
from ajet_proxy.core.ledger import attempts as unanswered
from ajet_proxy.core.ledger import client_commands, clients, commands, episode, leases, plays, supervisors, views
from ajet_proxy.core.ledger import runs as wanted
from ajet_proxy.core.ledger.state import LedgerSettings
from ajet_proxy.core.ledger.views import SHOWN, Wanted, overview, records
from ajet_proxy.core.protocol import exchange
from ajet_proxy.core.trajectory import drift_rate
from ajet_proxy.core.trajectory.timeline import pack
from ajet_proxy.io.capture import front, pipeline
from ajet_proxy.io.control import desk, openings
from ajet_proxy.io.control import runs as waiting
from ajet_proxy.io.engines import upstream
from ajet_proxy.io.http import aiohttp_internals
from ajet_proxy.io.http.audit import MAX_BYTES
from ajet_proxy.io.storage import journal
from ajet_proxy.offline import tree_row
from ajet_proxy.settings import OF_AGENTS
from ajet_sdk import bodies, frame, limits, routes, runs
from ajet_sdk.play.program import SECRETS
from ajet_sdk.routes import Abort, Play
from ajet_sdk.sample import Batch, BatchEpisode, Call, Group, Sample
from ajet_trainer.admission import Refusal
from tests.kit.engine_stub import EngineStub
from tests.kit.ledger_rig import LedgerRig, Shelf
from tests.kit.pages import contract, tables, words
from tests.kit.source import PACKAGES, ROOT, modules
from tests.proxy.serving import Client, serving

SECTIONS = contract()
TEAM = {"members": {"a": "stub"}, "teachers": {"b": "judge"}}
Fields = Mapping[str, bool]
"""Names of fields, and whether each must be there."""


def told(number: str, of: str | None = None) -> Fields:
    """The fields in a section's first table, or in its rows about one thing."""
    rows = [row if of is None else row[1:] for row in tables(SECTIONS[number])[0] if of in (None, row[0])]
    return {name: not mark for row in rows for name, mark in re.findall(r"`([^`]+)`(\??)", row[0])}


def inline(text: str) -> Fields:
    """The fields in ``{a, b?}``."""
    return {name: not mark for name, mark in re.findall(r"(\w+)(\??)", text.strip("{}[]"))}


def fits(fields: Fields, seen: Iterable[Collection[str]], *, unseen: Collection[str] = ()) -> None:
    """Each of `seen` has every field that must be there and none besides; together, all but those `unseen` here."""
    many = [set(one) for one in seen]
    for one in many:
        assert {name for name, needed in fields.items() if needed} <= one <= set(fields)
    assert set().union(*many) == set(fields) - set(unseen)


# -- control routes


async def test_the_answers_of_control_routes(tmp_path: Path) -> None:
    rows = {words(row[0])[0]: words(row[3]) for number in ("5.1", "8.1", "11")
            for row in tables(SECTIONS[number])[0]}
    answers = {route: inline(found[0]) for route, found in rows.items() if found}
    seen: dict[str, list[Collection[str]]] = {route: [] for route in rows}
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,)) as client:
        await play(client, seen)
        status = (await client.status()).keys()
    fits(told("11.1"), [status, status - {"any_model"}], unseen=["candidates", "intercept", "teams"])
    unseen = {"POST /gate/open": ["not_resumed"], "POST /rewards": ["reason", "reward_by_agent"]}
    for route, fields in answers.items():
        fits(fields, seen[route], unseen=unseen.get(route, []))
    for route in ("PUT /runs/{id}", "PATCH /runs/{id}", "GET /runs/{id}"):
        fits(told("12"), seen[route])


async def play(client: Client, seen: Mapping[str, list[Collection[str]]]) -> None:
    """Ask each route whose answer the page tells field by field, with all that an answer may hold."""

    async def ask(method: str, path: str, body: Any = None, **names: str) -> Any:
        answer = await client.control(method, path.format(**names), body)
        assert answer.status == 200, answer.body
        seen[f"{method} {path.partition('?')[0]}"].append(answer.json.keys())
        return answer.json

    for _ in range(2):
        id = (await ask("POST", "/episodes", TEAM | {"task": "t"}))["episode"]
        await client.chat(id, X_AJet_Agent="a")
        await ask("POST", "/episodes/{id}/heartbeat", id=id)
        await ask("POST", "/episodes/{id}/rewards", {"value": 1.0, "final": False}, id=id)
        await ask("POST", "/episodes/{id}/seal", id=id)
    game = (await ask("POST", "/episodes", {}))["episode"]
    for agent, value in (("a", 1.0), ("b", -1.0)):
        await ask("POST", "/episodes/{id}/rewards", {"value": value, "agent": agent, "final": False}, id=game)
    for end in ("heartbeat", "seal", "abort"):
        await ask("POST", f"/episodes/{{id}}/{end}", id=game)
    said = await client.chat("answered")
    await ask("POST", "/rewards", {"value": 1.0, "response": said.json["id"]})
    await play_judged(client, ask, said.json["id"])
    lost = (await ask("POST", "/episodes"))["episode"]
    await ask("POST", "/episodes/{id}/abort", id=lost)
    for end, body in (("seal", None), ("rewards", {"value": 1.0})):
        other = (await ask("POST", "/episodes"))["episode"]
        await ask("POST", f"/episodes/{{id}}/{end}", body, id=other)
    for path in ("/episodes?limit=1", "/episodes", "/overview"):
        await ask("GET", path)
    for end, body in (("nack", None), ("ack", {"policy_version": 1})):
        leased = await client.control("POST", "/batches/lease", {"group_size": 1})
        batch = frame.decode_batch(leased.body).batch
        await ask("POST", "/batches/{id}/extend", {}, id=batch)
        await ask("POST", f"/batches/{{id}}/{end}", body, id=batch)
    for more in ({}, {"run": "a"}):
        await ask("POST", "/policy", {"model": "stub", "version": 1} | more)
    await ask("POST", "/trainers", {"model": "stub", "run": "a", "instance": "i"})
    wanted = (await ask("POST", "/evaluations", {"model": "stub", "episodes": 1}))["evaluation"]
    await ask("GET", "/wanted")
    await ask("PUT", "/mix", {"shares": {"default": 1.0}, "ahead": 9})
    for path in ("/wanted", "/mix"):
        await ask("GET", path)
    await ask("DELETE", "/mix")
    await ask("POST", "/groups/flush", {})
    await ask("GET", "/evaluations/{id}", id=wanted)
    await ask("POST", "/plays", {"name": "d", "episodes": 1})
    await ask("GET", "/plays/{id}", id="d")
    await ask("DELETE", "/plays/{id}", id="d")
    joined = (await ask("POST", "/clients", {"name": "one"}))["client"]
    await ask("POST", "/clients/{id}/beat", id=joined)
    await ask("GET", "/clients")
    await ask("DELETE", "/clients/{id}", id=joined)
    await play_runs(ask)
    await ask("POST", "/gate/close", {})
    await ask("POST", "/gate/open", {"policy_version": 2})


async def play_judged(client: Client, ask: Callable[..., Awaitable[Any]], response: str) -> None:
    """A user says something, and a judge judges."""
    await ask("POST", "/feedback", {"value": 1.0, "response": response})
    await ask("POST", "/feedback", {"value": 1.0, "episode": "answered"})
    for rewards in ((), ({"value": 1.0, "agent": "a"}, {"value": 0.5, "agent": "b"})):
        judged = (await ask("POST", "/episodes", {"judged": True}))["episode"]
        await client.chat(judged, X_AJet_Agent="a")
        await ask("POST", "/episodes/{id}/seal", id=judged)
        await ask("POST", "/episodes/{id}/judgement", {"judge": "j", "rewards": rewards}, id=judged)


async def play_runs(ask: Callable[..., Awaitable[Any]]) -> None:
    """Have a run wanted, checked by a supervisor, told of and forgotten."""
    heard = await ask("POST", "/supervisor", supervisor := {"name": "s", "instance": "i", "wait_s": 5})
    put = asyncio.create_task(ask("PUT", "/runs/{id}", {"config": {}, "desired": "stopped"}, id="r"))
    heard = await ask("POST", "/supervisor", supervisor | {"known": heard["known"]})
    report = {"runs": {"r": {"state": "stopped"}}, "verdicts": {one: {"digest": "d"} for one in heard["checks"]}}
    await ask("POST", "/supervisor", supervisor | report)
    await put
    await ask("POST", "/supervisor", supervisor | report)
    await ask("PATCH", "/runs/{id}", {}, id="r")
    await ask("GET", "/runs")
    for rest in ("", "/metrics", "/log"):
        await ask("GET", f"/runs/{{id}}{rest}", id="r")
    await ask("DELETE", "/runs/{id}", id="r")


def test_the_record_of_an_episode() -> None:
    rig = LedgerRig(archive=(shelf := Shelf()))
    rig.evaluate("m")
    rig.open("plain", eval=True, model="m")
    rig.run(rig.commands.play(Play("d", 1), tenant="", at=rig.at))
    rig.open("played", play="d", place=0)
    rig.run(rig.commands.abort("played", Abort("away", "infra"), at=rig.at))
    rig.open(
        "over several", tenant="a", members={"x": "m", "y": "n"}, teachers={"z": "o"},
        metadata={"k": 1}, task="t",
    )
    for agent, model in (("x", "m"), ("y", "n")):
        rig.call("over several", agent=agent, model=model, tenant="a")
    for agent, value in (("x", 0.5), ("y", -0.5)):
        rig.reward("over several", value, agent=agent, final=False)
    rig.reward("over several", 1.0)
    rig.abort("plain", "why", "agent")
    rig.open("of a client", client=rig.join(), revision="r1")
    rig.call("chat.2", traffic="chat", first="chat")
    rig.feedback("chat.2", value=1.0)
    rig.seal("chat.2")
    rig.judge("chat.2")
    rig.withdraw("chat.2")
    shown = [views.record(rig.state, name) for name in ("plain", "over several", "of a client", "played", "chat.2")]
    rig.archive()
    shelf.take(rig.state, 1)
    shown.append(views.record(rig.state, "plain"))
    fields = told("5.3")
    fits(fields, shown)
    parts = ("models", "rewards", "unanswered", "calls", "timelines", "drift")
    assert tuple(fields)[-6:] == parts
    for one in records(rig.state, Wanted())["episodes"]:
        fits({name: must for name, must in fields.items() if name not in parts}, [one, set(fields) - set(parts)])


def test_what_an_episode_s_record_says_of_rewards_and_timelines() -> None:
    rig = LedgerRig(LedgerSettings(merge_policy="repair"))
    rig.restart()
    rig.open("e")
    first = rig.call("e", (1, 2), (3,))
    rig.call("e", (1, 2, 4, 5), (6,), same_text=(first, 3))
    rig.call("e", (7,), (8,))
    last = rig.call("e", (9,), (8,), agent="b")
    rig.reward("e", 1.0, call=last, agent="b", note="n", state="s", final=False)
    rig.reward("e", 1.0, model="m")
    shown = views.record(rig.state, "e")
    rows = {words(row[0])[0]: words(row[1]) for row in tables(SECTIONS["5.3"])[0]}
    fits(inline(rows["rewards"][0]), shown["rewards"])
    fits(inline(rows["timelines"][0]), shown["timelines"])
    fits(inline(rows["drift"][0]), shown["drift"].values())


def test_the_overview_and_what_stands_within_the_status() -> None:
    rig = LedgerRig()
    for name in ("a", "b"):
        rig.open(name, task="t")
        rig.call(name)
    rig.call("a")
    rig.reward("a")
    rig.announce()
    assert rig.lease(groups=1, group_size=1) is not None
    seen: Any = overview(rig.state, rig.at)
    rows = {words(row[0])[0]: words(row[1]) for row in tables(SECTIONS["11.2"])[0]}
    assert set(rows) == {*seen, "points"} and f"At most {SHOWN} of each list" in SECTIONS["11.2"]
    assert set(seen["rewards"]) == set(rows["rewards"][:2])
    curve = seen["rewards"]["train"]
    for shape, inner in (
        (rows["rewards"][2], [curve]), (rows["points"][0], curve["points"]), (rows["tasks"][0], seen["tasks"]),
        (rows["quiet"][0], seen["quiet"]), (rows["leases"][0], seen["leases"]),
    ):
        fits(inline(shape), inner)
    status = views.status(rig.state)
    shapes = {words(row[0])[0]: inline(words(row[1])[0]) for row in tables(SECTIONS["11.1"])[0] if "{" in row[1]}
    for name in ("gate", "groups", "batches", "calls", "tokens"):
        fits(shapes[name], [status[name]])
    figures = {"in_flight", "waiting", "busy_s"}  # which the process knows that holds the gate
    assert figures == shapes["requests"].keys()
    fits(shapes["models"], [figures | one.keys() for one in status["models"].values()])
    fits(shapes["drift_by_model"], status["drift_by_model"].values())


def test_what_is_shown_of_a_client() -> None:
    rig = LedgerRig()
    gone, live = rig.join("a", tenant="t"), rig.join("b")
    rig.leave(gone)
    shown = rig.commands.clients.shown(None, rig.at)
    assert [one["client"] for one in shown] == [live, gone]
    fits({name: not mark for row in tables(SECTIONS["5.5"])[0]
          for name, mark in re.findall(r"`([^`]+)`(\??)", row[0])}, shown)
    assert words(SECTIONS["5.5"].partition("It is gone when")[2])[:3] == list(routes.CLIENT_ENDS)
    causes = SECTIONS["5.2"].partition("says whose failure it was. The closed list:")[2]
    assert words(causes)[:2] == list(routes.ABORT_CAUSES)


# -- calls, samples and the wire

CALL = Call(
    call="c", episode="e", model="m", agent="", started_at=1.0, prompt_token_ids=(1,), token_ids=(2,), logprobs=(-1.0,),
    finish_reason="stop", policy_versions=((1, 1),), identified_by="key", altered=("logprobs",),
    continuity="exact", version_uncertain=True, same_text=("b", 1), sampling={"logprobs": "raw"},
    response="chatcmpl-1",
)
SAMPLE = Sample(
    sample="e/0", episode="e", task="t", model="m", agent="", token_ids=(1, 2), loss_mask=(0, 1), logprobs=(0.0, -1.0),
    policy_versions=((1, 1),), calls=("c",), spans=(("c", 1, 2),), reward=1.0, broken_by="template", repaired_tokens=1,
    uncertain_tokens=1, sampling=(({"logprobs": "raw"}, 1),), finish_reasons=("stop",),
    turns=(0,),
)


def plain(record: Any, fields: Fields) -> Any:
    """`record` with nothing in the fields that may be missing."""
    own = {f.name: f for f in dataclasses.fields(record)}
    return dataclasses.replace(record, **{
        name: own[name].default for name, needed in fields.items() if not needed and name in own
    })


def test_a_call_and_a_sample() -> None:
    for number, record in (("6.1", CALL), ("6.2", SAMPLE)):
        fields = told(number)
        fits(fields, [record.to_json(), plain(record, fields).to_json()])
    counted = pack(CALL).turn.summary(CALL.episode).keys()
    assert CALL.to_json().keys() - counted == {"prompt_token_ids", "token_ids", "logprobs"}
    assert counted - CALL.to_json().keys() == {"prompt_tokens", "sampled_tokens"}
    needed = ("call", "episode", "started_at", "prompt_token_ids", "token_ids", "logprobs")
    least = Call.from_json({name: CALL.to_json()[name] for name in needed})
    assert (least.model, least.agent, least.finish_reason, least.policy_versions) == ("", "", "stop", ((0, 1),))


def test_the_frame() -> None:
    samples = (SAMPLE, plain(SAMPLE, told("7.1", "sample")))
    given = {"id": "r", "value": 1.0, "final": True, "at": 1.0}
    episodes = (BatchEpisode("e", "t", "m", 1.0, (given,), samples),)
    batch = Batch("b", 1.0, 1, (Group("t", episodes, episodes, "l"),))
    sent = msgpack.unpackb(frame.encode_batch(batch), raw=False)
    group = sent["groups"][0]
    for of, seen in (
        ("frame", [sent]), ("group", [group]), ("tree", [group["tree"]]), ("episode", group["episodes"]),
        ("sample", group["episodes"][0]["samples"]),
    ):
        fits(told("7.1", of), seen)
    kinds = {"str": str, "bin": bytes, "int": int, "float": float, "array": list, "map": dict}
    for of, name, kind in tables(SECTIONS["7.1"])[0]:
        whole = group["episodes"][0]
        one = {"frame": sent, "group": group, "tree": group["tree"], "episode": whole}.get(of, whole["samples"][0])
        for word in words(name):
            assert isinstance(one[word], kinds[re.split(r"\W", kind)[0]]), (of, word)
    assert sent["version"] == frame.VERSION == 1 and frame.CONTENT_TYPE in SECTIONS["7"]


def test_a_tree() -> None:
    tree = tree_row([SAMPLE, plain(SAMPLE, told("6.2"))])
    fits(told("6.6"), [tree])
    with_end = told("6.2") | {"end": True}
    del with_end["token_ids"]
    fits(with_end, tree["samples"])


def test_what_the_trainer_refuses_for() -> None:
    assert tuple(words(SECTIONS["7.3"].partition("The closed list:")[2])) == get_args(Refusal)


# -- variables and limits


def test_the_environment() -> None:
    named = {
        name for module in modules(*PACKAGES) for name in re.findall(r'"(AJET_[A-Z_]*)"', (ROOT / module).read_text())
    }
    found = {word for row in tables(SECTIONS["15"])[0] for word in words(row[0])}
    assert found - {"SSL_CERT_FILE", "OTEL_EXPORTER_OTLP_ENDPOINT"} == named | {*OF_AGENTS, *SECRETS}
    taken = SECTIONS["15"].partition("`ajet run` takes")[2].partition("out of")[0]
    assert words(taken) == list(SECRETS)


LIMITS = (
    ("a reward", limits.MAX_REWARD), ("rewards of an episode", episode.MAX_REWARDS),
    ("rewards of an episode", episode.MAX_NOTES), ("rewards of an episode", limits.MAX_WORDS),
    ("an abort's reason", limits.MAX_WORDS), ("names of tasks", limits.MAX_LABEL), ("names of tasks", limits.MAX_ID),
    ("the body of a control request", limits.MAX_OPENING), ("the body of a control request", limits.MAX_CONTROL),
    ("an event of an engine's stream", exchange.MAX_EVENT), ("the frame of one lease", leases.LEASE_BYTES),
    ("the episodes of one lease", leases.LEASE_EPISODES), ("a frame that a trainer reads", frame.MAX_FRAME_BYTES),
    ("a header, the request line", aiohttp_internals.MAX_HEADER), ("messages or items", front.MAX_MESSAGES),
    ("choices of a request", pipeline.MAX_CHOICES), ("lanes of a mix", limits.MAX_LANES),
    ("time that an episode of a", openings.HOLD_S), ("attempts of an episode", unanswered.MOST),
    ("episodes of an evaluation", limits.MAX_EVALUATION), ("episodes of a play", limits.MAX_PLAY),
    ("plays of a tenant", commands.MAX_PLAYS), ("places of a play", plays.SHOWN),
    ("a client's name and lane", limits.MAX_CLIENT_TEXT), ("a client's `ttl_s`", limits.MAX_TTL_S),
    ("clients of a tenant", client_commands.MAX_CLIENTS), ("clients that are gone", clients.KEPT_GONE),
    ("time for the head", aiohttp_internals.PATIENCE_S), ("time for a body", aiohttp_internals.PATIENCE_S),
    ("time in which a client reads nothing", aiohttp_internals.PATIENCE_S),
    ("time for an engine to accept", upstream.CONNECT_S), ("an episode's key", desk.KEY_TTL_S),
    ("the audit log", MAX_BYTES), ("turns of a model's latest", drift_rate.LIMIT),
    ("[runs]", wanted.MAX_RUNS), ("[runs]", runs.MAX_CONFIG), ("lines of a run's log", supervisors.MAX_LINES),
    ("lines of a run's log", supervisors.MAX_BYTES), ("lines of a run's log", supervisors.MAX_LINE),
    ("a run's reason", supervisors.MAX_REASON), ("silence of a supervisor", supervisors.SILENT_S),
    ("time that a configuration waits", waiting.VERDICT_S), ("time that a configuration waits", waiting.MAX_POLL_S),
)
"""The beginnings of rows of the page of limits, and a number that each of them has."""


def written(limit: float) -> set[str]:
    """The ways in which the page may write a number: with a unit of bytes or time, or as a share."""
    units = {" KiB": 1 << 10, " MiB": 1 << 20, " GiB": 1 << 30, " days": 86_400}
    return {
        f"{limit:,.0f}", f"{limit:.0e}".replace("+", ""), f"{limit:.0%}".replace("%", " %"),
        *(f"{limit / size:g}{unit}" for unit, size in units.items()),
    }


def test_the_limits_that_are_fixed() -> None:
    rows = tables((ROOT / "docs/reference/limits.md").read_text())[0]
    for begins, limit in LIMITS:
        (row,) = (row for row in rows if row[0].startswith(begins))
        numbers = "|".join(re.escape(one) for one in written(limit))
        assert re.search(rf"(?<![\d,.])({numbers})(?!,?\d)", row[1]), (begins, limit)
    text = " ".join(" ".join(SECTIONS.values()).split())
    for said, limit in (
        (f"to {limits.MAX_VERSION} ", limits.MAX_VERSION), (f"up to {limits.MAX_LABEL} characters", limits.MAX_LABEL),
        (f"{bodies.MAX_NESTING} levels of nesting", bodies.MAX_NESTING), (f"1 to {MAX_RECORDS}", MAX_RECORDS),
        ("more than 1 GiB", journal.MAX_RECORD), ("more than 32 MiB", exchange.MAX_EVENT),
        ("beyond 256 MiB", leases.LEASE_BYTES), ("or 1,000 episodes", leases.LEASE_EPISODES),
    ):
        assert limit and said in text, said
    assert (journal.MAX_RECORD, exchange.MAX_EVENT, leases.LEASE_BYTES) == (1 << 30, 32 << 20, 256 << 20)
