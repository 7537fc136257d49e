"""A storm of judges: users' chats are judged by processes that are killed, as the daemon is, by a model that fails.

Users come with a session, a path or nothing but their history. They pause, come back, take chats back, and give
thumbs. Judges are ajet's own, each with several episodes in hand; they die at any instant, before, during and after a
post too. The model that judges answers 500, hangs, or says what is no verdict. What judges and users noted is held
against what the daemon says, at every look and in the end.
"""

from __future__ import annotations

import asyncio
import math
import random
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from ajet_sdk.client import Client
from ajet_sdk.frame import decode_batch
from ajet_sdk.judge import judges, work
from ajet_sdk.judge.judges import Episode, Failed, Model, Rest, Verdicts
from ajet_sdk.judge.work import Options, Work
from ajet_sdk.rewards.judging import Budget
from tests.faults.notes import Notes, replace
from tests.faults.stage import Asking, Engine, Worker, forked
from tests.faults.trainer import Orders
from tests.kit.judge_stub import judging
from tests.kit.proxy_process import ProxyProcess
from tests.kit.rig import STATES
from tests.kit.source import ROOT

JUDGES, PARALLEL, USERS = 3, 4, 12
IDLE_S, LEASE_S, ASK_S, BACKOFF_S = 0.4, 15.0, 1.0, 0.2
BACKLOG, MOST_LEASED = 100, 32
MODEL = "policy"
PATIENCE_S = 600.0
FAILS = 0.25
"""So often the model that judges gives no verdict."""
INSTANTS = ("before a post", "during a post", "after a post")
TOO_LATE = ("unknown_call", "episode_archived")
"""Feedback on a call that is in the archive by now is answered so."""
OUTCOMES = ("awaiting", "judged", "rewarded", "not_judged", "withdrawn", "lost")


def value_of(answer: str) -> float:
    """The verdict on an answer, which everybody can tell again."""
    return zlib.crc32(answer.encode()) % 201 / 100 - 1


class NotedModel(Model):
    """Notes what it is asked about, and what of that comes to nothing."""

    notes: Notes

    async def judge(self, episode: Episode) -> Verdicts:
        self.notes.add("asks", episode=episode["episode"])
        try:
            return await super().judge(episode)
        except Failed:
            self.notes.add("left", episode=episode["episode"])
            raise


class NotedWork(Work):
    """Notes each judgement with a reward that was acknowledged. It may die around a post."""

    notes: Notes
    orders: Orders

    async def _send(
        self, episode: str, outcome: str, rewards: Sequence[Mapping[str, Any]] = (), *, withdraw: bool = False
    ) -> bool:
        self.orders.reached("before a post")
        self.orders.during("during a post")
        taken = await super()._send(episode, outcome, rewards, withdraw=withdraw)
        if taken:
            values = {one["call"]: one["value"] for one in rewards}
            self.notes.add("judged", episode=episode, judge=self._options.name, rewards=values)
        self.orders.reached("after a post")
        return taken


def judge(url: str, model: str, name: str, notes: Path, order: Path) -> None:
    """Runs in the process of a judge, until it is killed."""
    vars(work).update(LEASE_S=LEASE_S, PROBE_EVERY=sys.maxsize)
    judges.ASK_S, judges.BACKOFF_FIRST_S, judges.BACKOFF_MAX_S = ASK_S, BACKOFF_S, BACKOFF_S

    async def judged() -> None:
        rest, budget = Rest(), Budget(None)
        async with Client(url, deadline=PATIENCE_S) as client:
            grader = NotedModel(
                f"{model}#grader", "rubric", votes=1, budget=budget, words=True, say=lambda line: None, rest=rest
            )
            how = Options(name, parallel=PARALLEL, feedback_weight=0.0)
            at_work = NotedWork(client, grader, how, budget=budget, rest=rest, show=lambda line: None, say=print)
            at_work.notes = grader.notes = Notes(notes)
            at_work.orders = Orders(order)
            await at_work.run()

    sys.stdout = open(notes.with_suffix(".said"), "w")  # noqa: SIM115
    asyncio.run(judged())


def users(url: str, seed: int, chats: int, notes: Path, begin: Path) -> None:
    """Has so many chats, as the process of all users. As many as the file `begin` says may have begun by now."""
    asyncio.run(Users(url, seed, Notes(notes), begin).chat(chats))


class Users:
    """They retry what a dead daemon did not answer. Any other error is noted, and there must be none."""

    def __init__(self, url: str, seed: int, notes: Notes, begin: Path) -> None:
        self._url, self._dice, self._notes, self._begin = url, random.Random(seed), notes, begin

    async def chat(self, chats: int) -> None:
        numbers = iter(range(chats))
        async with httpx.AsyncClient(timeout=30.0, trust_env=False, verify=False) as client:

            async def user() -> None:
                for number in numbers:
                    while number >= int(self._begin.read_text()):  # noqa: ASYNC110 - another process writes it
                        await asyncio.sleep(0.05)
                    await self._one(client, number)

            await asyncio.gather(*(user() for _ in range(USERS)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        dice, name = self._dice, f"chat{number}"
        way, messages = dice.choice(("path", "body", "lineage")), list[dict[str, Any]]()
        base = f"{self._url}/e/{name}/v1" if way == "path" else f"{self._url}/v1"
        for turn in range(dice.choice((1, 1, 1, 2, 3))):
            messages.append({"role": "user", "content": f"{name} turn {turn}"})
            body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 8, "seed": number}
            takes_back = dice.random() < 0.04
            headers = {"X-AJet-Traffic": "0"} if takes_back else {}
            body |= {"user": name} if way == "body" else {}
            answer = await self._insist(client, f"{base}/chat/completions", body, headers)
            found, episode = answer.json(), answer.headers["x-ajet-episode"]
            text = found["choices"][0]["message"]["content"] or ""
            messages.append({"role": "assistant", "content": text})
            self._notes.add("answer", call=answer.headers["x-ajet-call"], episode=episode)
            if takes_back:
                self._notes.add("took back", episode=episode)
            elif dice.random() < 0.1:
                said = {"call": answer.headers["x-ajet-call"], "value": dice.choice((-1, 1))}
                await self._insist(client, f"{self._url}/ajet/v1/feedback", said, {})
            await asyncio.sleep(dice.choice((0.0, 0.05, 2 * IDLE_S, 4 * IDLE_S)) * dice.random())
        self._notes.add("chat", name=name)

    async def _insist(
        self, client: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> httpx.Response:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = await client.post(url, json=body, headers=headers)
                is_late = url.endswith("/feedback") and answer.json().get("error", {}).get("code") in TOO_LATE
                if answer.status_code == 200 or is_late:
                    return answer
                self._notes.add("failed", why=f"{url}: {answer.status_code} {answer.text[:300]}")
                sys.exit(1)
            except httpx.TransportError:
                assert time.monotonic() < give_up
                await asyncio.sleep(0.05)


class Stage:
    """The processes of a run in `root`, an empty folder."""

    def __init__(self, root: Path, seed: int, chats: int, model: str) -> None:
        self.notes, conditions = root / "notes", root / "conditions"
        for folder in (self.notes, conditions):
            folder.mkdir(parents=True)
        (conditions / "clock").write_text("0")
        self.engine, self._model, self.order, self._begin = Engine(MODEL), model, root / "order", root / "begin"
        self.begin(0)
        self.proxy = ProxyProcess(
            f"{MODEL}={self.engine.url}", root / "data",
            inside=(sys.executable, "-m", "tests.faults.daemon", str(conditions)), env={"PYTHONPATH": str(ROOT)},
            options=["--group-size", "1", "--traffic", "chat", "--traffic-idle", str(IDLE_S), "--traffic-backlog",
                     str(BACKLOG)],
        )  # fmt: skip
        self.proxy.start()
        self.http = httpx.Client(base_url=f"{self.proxy.url}/ajet/v1", timeout=300.0, trust_env=False)
        self.users = forked(users, self.proxy.url, seed, chats, self.notes / "users.log", self._begin)
        self.judges = [Worker(lambda life, n=n: self._judge(f"j{n}l{life}", n)) for n in range(JUDGES)]  # type: ignore[misc]

    def begin(self, chats: int) -> None:
        """So many chats may have begun from now on."""
        replace(self._begin, str(chats))

    def _judge(self, name: str, place: int) -> BaseProcess:
        order = self.order.with_suffix(f".{place}")
        order.unlink(missing_ok=True)
        return forked(judge, self.proxy.url, self._model, name, self.notes / f"{name}.log", order)

    def kill_judge(self, dice: random.Random) -> str:
        """At any instant, or around a post; the name of the instant."""
        place, instant = dice.randrange(JUDGES), dice.choice((*INSTANTS, "any", "any"))
        worker = self.judges[place]
        if instant != "any":
            replace(self.order.with_suffix(f".{place}"), f"kill {instant}")
            worker.process.join(10.0)
        if worker.process.is_alive():
            instant = "any"
            worker.process.kill()
        assert worker.killed(), f"a judge ended by itself: {worker.process.exitcode}"
        worker.again()
        return instant

    def close(self) -> None:
        for process in (self.users, *(worker.process for worker in self.judges)):
            process.kill()
            process.join()
        self.proxy.kill()
        self.engine.stop()
        self.http.close()


class Audit(Asking):
    """Everything that was noted, against what the daemon says."""

    stage: Stage

    def __init__(self, stage: Stage, counts: Counter[str]) -> None:
        super().__init__(stage, counts)
        self.judged: dict[str, tuple[str, dict[str, float]]] = {}
        self._gone = set[str]()
        self._answers: dict[str, str] = {}
        self.chats = self.asks = self.left = 0

    def look(self) -> dict[str, int]:
        """The sums, and one batch, which has nothing that was taken back before."""
        self.read()
        status = self.ask("GET", "/status")
        episodes, traffic = status["episodes"], status["traffic"]
        assert episodes["opened"] == sum(episodes[state] for state in STATES), episodes
        assert traffic["sealed"] == sum(traffic[name] for name in OUTCOMES), traffic
        assert traffic["awaiting"] <= BACKLOG, traffic
        self.counts["times that the sums held"] += 1
        self.counts["most that awaited"] = max(self.counts["most that awaited"], traffic["awaiting"])
        self._train(min(MOST_LEASED, episodes["ready"]))
        return {"open": episodes["open"], "awaiting": traffic["awaiting"], "sealed": episodes["sealed"]}

    def _train(self, ready: int) -> None:
        lease = {"model": MODEL, "groups": max(1, ready), "group_size": 1, "wait_s": 0, "lease_s": 5}
        answer = self.asked("POST", "/batches/lease", lease)
        if answer.status_code != 200:
            return
        batch = decode_batch(answer.content)
        names = [one.episode for group in batch.groups for one in group.episodes]
        for name in names:
            record = self.ask("GET", f"/episodes/{name}")
            assert record.get("first", name) not in self._gone, f"{name} was taken back before its lease"
            self.check(record)
        self.asked("POST", f"/batches/{batch.batch}/ack", {"policy_version": 1})
        self.counts["episodes leased, of which nothing was taken back before"] += len(names)

    def read(self) -> None:
        """Reads the notes since the last look."""
        for note in self.reader.new(*sorted(self.stage.notes.glob("*.log"))):
            match note["kind"]:
                case "judged":
                    said = (note["judge"], note["rewards"])  # one that lost its lease may say the same again
                    assert self.judged.setdefault(note["episode"], said) == said, f"{note['episode']} was judged twice"
                case "took back":
                    self._gone.add(self.ask("GET", f"/episodes/{note['episode']}").get("first", note["episode"]))
                case "answer":
                    self._answers[note["call"]] = note["episode"]
                case "chat":
                    self.chats += 1
                case "asks":
                    self.asks += 1
                case "left":
                    self.left += 1
                case "failed":
                    raise AssertionError(f"a user met an error: {note['why']}")

    def users_are_well(self, wait_s: float = 0.0) -> None:
        """They have all they asked for, or go on after so many seconds."""
        self.stage.users.join(wait_s)
        if self.stage.users.exitcode:
            self.read()  # says what they met
            raise AssertionError(f"users ended with {self.stage.users.exitcode}")

    def check(self, record: dict[str, Any]) -> None:
        """An episode has the rewards of one judgement, or a reason."""
        name, given = record["episode"], Counter(one["call"] for one in record["rewards"])
        assert max(given.values(), default=1) == 1, f"a call of {name} has two rewards"
        values = {one["call"]: one["value"] for one in record["rewards"]}
        here = (record.get("judged_by"), values)
        assert here == self.judged.get(name, here), f"{name} has not what was acknowledged"
        assert bool(values) == ("judged_by" in record), record
        assert ("judged_by" in record) or record["state"] == "discarded", record
        assert (record["state"] == "discarded") == ("reason" in record), record

    def in_the_end(self, bound: int) -> None:
        self.read()
        records = {name: self.ask("GET", f"/episodes/{name}") for name in self.listed()}
        assert set(self.judged) <= set(records), "a judged episode is gone"
        calls = {call["call"]: call for record in records.values() for call in record["calls"]}
        lost = [call for call in self._answers if not calls.get(call, {}).get("complete")]
        assert not lost, f"answered calls are not there: {lost[:5]}"
        for name, record in records.items():
            self.check(record)
            if record.get("first", name) in self._gone and record["state"] in ("ready", "recorded"):
                assert record["state"] == "recorded", f"{name} was taken back, and is ready"
        judged = sum("judged_by" in record for record in records.values())
        reasons = Counter(record["reason"] for record in records.values() if "reason" in record)
        wasted = self.asks - self.left - judged
        assert 0 <= wasted <= bound, f"{wasted} judge calls were wasted, of {bound} that may be"
        self.counts |= Counter({
            "chats": self.chats, "episodes": len(records), "… judged once": judged,
            "judgements acknowledged, found whole": len(self.judged), "judge calls": self.asks,
            "… that failed, and were none": self.left, "… wasted by kills": wasted, "… that may have been": bound,
            "chats that were taken back": len(self._gone),
        }) | Counter({f"episodes discarded as {reason}": number for reason, number in reasons.items()})  # fmt: skip


def storm(
    root: Path, seed: int, kills: int, proxy_kills: int, chats: int, progress: Callable[..., None],
    counts: Counter[str],
) -> None:
    """Users have so many `chats`, while judges and the daemon are killed so often, evenly over them."""
    dice, calm = random.Random(seed), False

    def verdict(items: dict[str, Any]) -> Any:
        right = {label: value_of(shown["answer"]) for label, shown in items.items()}
        if calm or dice.random() > FAILS:
            return right
        kind = dice.choice(("500", "hang", "prose", "nan", "ids", "1e9", "more"))
        counts[f"failures of the model that judges: {kind}"] += 1
        if kind == "hang":
            time.sleep(2 * ASK_S)
        return {
            "500": 500, "prose": "It is good.", "nan": '{"answer 1": NaN}', "ids": {"answer 7": 1},
            "1e9": {"answer 1": 1e9}, "more": {**right, "answer 9": 1},
        }.get(kind, right)  # fmt: skip

    with judging(verdict) as grader:
        stage = Stage(root, seed, chats, grader.url)
        audit = Audit(stage, counts)
        try:
            faults = ["judge"] * kills + ["proxy"] * proxy_kills
            dice.shuffle(faults)
            for number, kind in enumerate(faults):
                stage.begin((number + 1) * chats // len(faults))
                while audit.chats < number * chats // len(faults):
                    audit.look()
                    audit.users_are_well()
                    progress(f"judges: {number} of {len(faults)} kills, {audit.chats} of {chats} chats")
                    time.sleep(0.02)
                if kind == "judge":
                    counts[f"kills of a judge: {stage.kill_judge(dice)}"] += 1
                else:
                    time.sleep(dice.random())
                    stage.proxy.kill()
                    assert stage.proxy.status == -signal.SIGKILL
                    counts["kills of the daemon that is judged for"] += 1
                    stage.proxy.start()
                audit.look()
            stage.begin(chats)
            audit.users_are_well(PATIENCE_S)
            assert not stage.users.is_alive()
            calm = True
            give_up = time.monotonic() + PATIENCE_S
            for worker in stage.judges:  # each has episodes that it passes over
                worker.kill()
                worker.again()
            while any(audit.look().values()):
                assert time.monotonic() < give_up, "not all was judged"
                progress("judges: the rest is judged")
                time.sleep(0.2)
            audit.in_the_end(bound=math.ceil(PARALLEL * (kills + JUDGES + JUDGES * proxy_kills)))
            assert stage.proxy.stop() == 0
            assert "Traceback" not in stage.proxy.errors(), stage.proxy.errors()[-4000:]
        finally:
            stage.close()
