"""Records what the daemon leaves on disk and sends.

    .venv/bin/python -m tests.formats.record     writes data.tar.xz, said.json.xz and frame.msgpack beside this file

The data directory holds an archive, a snapshot and segments behind it, with every kind of event and every state of an
episode. Beside it stands what the daemon said of them. The frame is that of `tests.sdk.test_frame`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import lzma
import tarfile
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from ajet_proxy.core.ledger import commands, retention
from ajet_proxy.io.storage import compactor
from ajet_proxy.io.storage.compaction import compact
from ajet_proxy.io.storage.journal import Journal
from ajet_proxy.offline import replay_lines
from ajet_sdk.frame import decode_batch, encode_batch
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import Client, eventually, serving
from tests.sdk.test_frame import batch

HERE = Path(__file__).parent
KEPT = ("journal/*", "archive*")
"""The files of a data directory that are no machine's own: no keys and no locks."""
PATIENT = {"idle_timeout": 1e11, "wall_timeout": 1e11}
"""Timeouts: an episode that is open stays so for as long as anybody reads it."""


async def call(client: Client, episode: str, content: str, path: str = "chat/completions", **more: Any) -> str:
    headers = more.pop("headers", {})
    body: dict[str, Any] = {"model": "stub", "max_tokens": 6, "seed": len(content)} | more
    match path:
        case "completions":
            body["prompt"] = content
        case "responses":
            body = {"model": "stub", "input": content, "max_output_tokens": 6}
        case _:
            body["messages"] = body.get("messages", [{"role": "user", "content": content}])
    answer = await client.ask("POST", f"/e/{episode}/v1/{path}", body, **headers)
    assert answer.status == 200, answer.body
    return str(answer.headers["X-AJet-Call"])


async def control(client: Client, method: str, path: str, body: Any = None) -> Any:
    answer = await client.control(method, path, {} if body is None and method == "POST" else body)
    assert answer.status < 300, (path, answer.body)
    return answer


async def played(client: Client, name: str, task: str, reward: float | None = 1.0, **headers: str) -> str:
    """An episode of two turns, the second of which goes on from the first."""
    first = [{"role": "user", "content": f"say {name}"}]
    answer = await client.ask(
        "POST", f"/e/{name}/v1/chat/completions",
        {"model": "stub", "max_tokens": 6, "messages": first, "seed": 7}, X_AJet_Task=task, **headers,
    )  # fmt: skip
    said = answer.json["choices"][0]["message"]["content"]
    more = [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    await call(client, name, "", messages=first + more)
    if reward is not None:
        await control(client, "POST", f"/episodes/{name}/rewards", {"value": reward, "id": f"of-{name}"})
    return name


async def lease(client: Client, **more: Any) -> str:
    body = {"groups": 1, "group_size": 2, "lease_s": 6e5, "model": "stub"} | more
    answer = await control(client, "POST", "/batches/lease", body)
    assert answer.status == 200
    return decode_batch(answer.body).batch


async def plays(client: Client, name: str) -> str:
    """A client that has joined and plays; its id."""
    body = {"name": name, "lane": "math", "revision": "r1", "ttl_s": 3600.0}
    joined = (await control(client, "POST", "/clients", body)).json["client"]
    for revision in ("r1", "r2"):
        await control(client, "POST", "/episodes", {"task": "math/1", "client": joined, "revision": revision})
    failed = (await control(client, "POST", "/episodes", {"client": joined})).json["episode"]
    await control(client, "POST", f"/episodes/{failed}/abort", {"reason": "no network", "cause": "infra"})
    return str(joined)


async def first_life(client: Client, engine: str) -> None:
    await plays(client, "stays")
    await control(client, "DELETE", f"/clients/{await plays(client, 'left')}")
    await control(client, "POST", "/policy", {"model": "stub", "version": 3, "upstreams": [engine]})
    await control(client, "POST", "/policy", {"model": "next", "version": 4, "candidate_of": "stub"})
    for number in range(4):
        await played(client, f"old-{number}", "old task", float(number))
    first = await lease(client, groups=2)
    await control(client, "POST", f"/batches/{first}/extend", {"lease_s": 6e5})
    await control(client, "POST", f"/batches/{first}/ack", {"policy_version": 4, "filtered": {"old-3": "too long"}})
    await control(client, "POST", "/gate/close", {"reason": "weights"})
    await control(client, "POST", "/gate/open", {"policy_version": 4})
    for number in range(6):
        await played(client, f"seen-{number}", "evaluation", 0.5, X_AJet_Eval="1")
    await played(client, "aborted", "t", None)
    await control(client, "POST", "/episodes/aborted/abort", {"reason": "no more"})
    await eventually(lambda: archived(client, 8))


async def archived(client: Client, number: int) -> bool:
    return bool((await client.status())["archived"] >= number)


async def second_life(client: Client) -> None:
    for number in range(6):
        await played(client, f"new-{number}", "new task", number / 4)
    trained = await lease(client)
    await control(client, "POST", f"/batches/{trained}/ack", {"policy_version": 5})
    returned = await lease(client)
    await control(client, "POST", f"/batches/{returned}/extend", {"lease_s": 6e5})
    await control(client, "POST", f"/batches/{returned}/nack")
    await control(client, "POST", "/gate/close", {"reason": "weights", "model": "stub"})
    await control(client, "POST", "/gate/open", {"policy_version": 5, "model": "stub"})
    await played(client, "dropped", "t", None)
    await control(client, "POST", "/episodes/dropped/abort", {"reason": "no more"})
    await call(client, "seen", "an evaluation", headers={"X_AJet_Eval": "1"})
    await control(client, "POST", "/episodes/seen/rewards", {"value": 1.0, "id": "of-seen"})
    await lease(client)
    opened = {"task": "pair", "members": {"planner": "stub", "critic": "other"}, "metadata": {"from": ["here", 1]}}
    team = (await control(client, "POST", "/episodes", opened)).json["episode"]
    for agent, model in (("planner", "stub"), ("critic", "other")):
        await call(client, team, f"as {agent}", headers={"X_AJet_Agent": agent}, model=model)
    body = {"value": 0.25, "agent": "planner", "final": False, "note": "well said"}
    await control(client, "POST", f"/episodes/{team}/rewards", body)
    await control(client, "POST", f"/episodes/{team}/seal")
    await call(client, "open", "several", n=3, headers={"Idempotency_Key": "one"})
    await call(client, "open", "several", n=3, headers={"Idempotency_Key": "one"})
    await call(client, "open", "a prompt", "completions")
    await call(client, "open", "an input", "responses")
    one = await call(client, "open", "a message", "messages")
    await control(client, "POST", "/episodes/open/heartbeat")
    step = {"value": 2.0, "call": one, "final": False, "id": "step", "state": "in the kitchen"}
    await control(client, "POST", "/episodes/open/rewards", step)
    for name in ("judged", "awaits"):
        await control(client, "POST", "/episodes", {"id": name, "task": "t", "judged": True})
        await call(client, name, "judge this")
        await control(client, "POST", "/feedback", {"episode": name, "value": 1, "text": "well done"})
        await control(client, "POST", f"/episodes/{name}/seal")
    judgement = {"judge": "j", "rewards": [{"value": 0.5}], "tokens": 7}
    await control(client, "POST", "/episodes/judged/judgement", judgement)
    await call(client, "withdrawn", "nothing of mine", headers={"X_AJet_Traffic": "0"})
    await played(client, "unrewarded", "t", None)
    await control(client, "POST", "/episodes/unrewarded/seal")
    await plays(client, "again")
    await plays(client, "again")
    for play in ("goes-on", "over"):
        await control(client, "POST", "/plays", {"name": play, "episodes": 2})
    await control(client, "DELETE", "/plays/over")
    await control(client, "POST", "/episodes", {"task": "a", "play": "goes-on", "place": 0})
    await control(client, "PUT", "/mix", {"shares": {"math": 0.5, "code": 0.5}, "ahead": 8, "model": "stub"})
    await control(client, "POST", "/groups/flush", {"task": "new task"})
    await control(client, "POST", "/evaluations", {"model": "stub", "episodes": 2})
    await control(client, "POST", "/policy", {"model": "next", "version": 6, "candidate_of": "stub"})
    for says in ("begins", "leaves"):
        trainer = {"model": "other", "run": "run", "instance": "one", "says": says}
        await control(client, "POST", "/trainers", trainer)
    await eventually(lambda: archived(client, 12))


async def seldom(client: Client) -> None:
    """Whatever hardly ever happens."""
    for more in ({}, {"user": "shared"}, {"user": "shared"}):
        unnamed = {"model": "stub", "max_tokens": 3, "messages": [{"role": "user", "content": "?"}], **more}
        assert (await client.ask("POST", "/v1/chat/completions", unnamed)).status == 200
    await control(client, "POST", "/episodes", {"id": "held"})
    await control(client, "POST", "/gate/close", {"reason": "weights", "model": "stub"})
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(client.chat("held"), 1.0)

    async def lost() -> object:
        return (await client.record("held"))["unanswered"]

    await eventually(lost)
    await control(client, "POST", "/gate/open", {"policy_version": 5, "model": "stub"})
    await control(client, "PUT", "/mix", {"ahead": 1, "group_size": 1, "model": "lacks"})
    await control(client, "POST", "/episodes", {"task": "lacks/1", "model": "lacks"})
    await control(client, "POST", "/batches/lease", {"groups": 2, "model": "lacks", "group_wait_s": 0})
    await played(client, "quick", "math/race")
    await control(client, "POST", "/episodes", {"id": "slow", "task": "math/race", "model": "stub"})
    with mock.patch.object(commands, "LEAST_WAIT_S", 0.0):
        await eventually(lambda: client.store.state.episodes["slow"].late)
    for run in ("stays", "goes"):
        await wanted(client, run)
    await control(client, "DELETE", "/runs/goes")


async def wanted(client: Client, run: str) -> None:
    """A stopped run is wanted, and its supervisor has nothing against it."""
    supervisor = {"name": "s", "instance": "i", "runs": {run: {"state": "stopped"}}}
    await control(client, "POST", "/supervisor", supervisor)
    config = {"trainer": {"model": "stub", "groups": 4}}
    put = asyncio.create_task(control(client, "PUT", f"/runs/{run}", {"config": config, "desired": "stopped"}))

    async def answered() -> bool:
        checks = (await control(client, "POST", "/supervisor", supervisor)).json["checks"]
        verdicts = {check: {"digest": "d1"} for check in checks}
        await control(client, "POST", "/supervisor", supervisor | {"verdicts": verdicts})
        return put.done()

    await eventually(answered)
    await put


async def told(client: Client) -> dict[str, Any]:
    """All that the daemon says."""
    status = await client.status()
    listed = (await client.control("GET", "/episodes?limit=1000")).json["episodes"]
    names = sorted(item["episode"] for item in listed)
    records = {name: (await client.control("GET", f"/episodes/{name}?tokens=1")).json for name in names}
    for record in records.values():
        record.pop("active_at")  # of an open one, its reader's start, as of the time in which it was away
        record["unanswered"] = [one["reason"] for one in record.get("unanswered", ())]
    shown = (await client.control("GET", "/clients")).json["clients"]
    clients = [{key: value for key, value in one.items() if key in CLIENT} for one in shown]
    runs = [{key: run[key] for key in RUN} for run in (await client.control("GET", "/runs")).json["runs"]]
    return {"status": {key: status[key] for key in STATUS}, "records": records, "clients": clients, "runs": runs}


CLIENT = ("client", "name", "state", "reason", "lane", "revision", "revisions", "episodes", "discarded", "failures")
RUN = ("run", "supervisor", "desired", "config", "digest", "starts")
STATUS = ("episodes", "groups", "tokens", "drift", "discarded", "archived", "captures")


async def record() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        data_dir = Path(folder) / "data"
        patches.enter_context(mock.patch.object(retention, "KEPT_EPISODES", 2))
        patches.enter_context(mock.patch.object(compactor, "is_due", return_value=False))
        defaults = Journal.__init__.__kwdefaults__ or {}
        patches.enter_context(mock.patch.dict(defaults, {"segment_bytes": 8 << 10}))
        async with EngineStub() as stub:
            async with serving(data_dir, upstream=(stub.url,), **PATIENT) as client:
                await first_life(client, stub.url)
                await client.store.end_segment()
            compact(data_dir)
            async with EngineStub(("other",)) as other, serving(data_dir, upstream=(stub.url,), **PATIENT) as client:
                await control(client, "POST", "/policy", {"model": "other", "version": 1, "upstreams": [other.url]})
                await second_life(client)
                await seldom(client)
        async with serving(data_dir, upstream=("http://127.0.0.1:9",)) as client:
            said = await told(client)
        said["replayed"] = [json.loads(line) for line in replay_lines(data_dir)]
        (HERE / "said.json.xz").write_bytes(lzma.compress(json.dumps(said, sort_keys=True).encode()))
        (HERE / "frame.msgpack").write_bytes(encode_batch(batch()))
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:xz") as tar:
            for path in sorted(path for pattern in KEPT for path in data_dir.glob(pattern)):
                tar.add(path, str(path.relative_to(data_dir)), filter=anonymous)
        (HERE / "data.tar.xz").write_bytes(packed.getvalue())


def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    asyncio.run(record())
