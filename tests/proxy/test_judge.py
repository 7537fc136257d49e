"""`ajet judge` before the real daemon, with a scripted engine and a scripted judge."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.io.control.judgements import Judgements
from ajet_sdk import client as sdk
from ajet_sdk.client import Reply
from ajet_sdk.errors import AjetError
from ajet_sdk.judge import judges
from ajet_sdk.judge.judges import Failed, Function, Judge, Model, Rest
from ajet_sdk.judge.work import Options, Work
from ajet_sdk.rewards.judging import Budget
from ajet_sdk.routes import Judgement
from tests.kit.judge_stub import JudgeStub, judging, shown_in
from tests.proxy.serving import Client, eventually

Score = Callable[[dict[str, Any]], Any]
UNIT: dict[str, Any] = {"episode": "e", "task": "t", "lane": "l", "eval": False, "calls": [{"call": "c"}]}


class Bench:
    """The view that a test has of a judge at work."""

    def __init__(self, work: Work, said: list[str], shown: list[str]) -> None:
        self.work, self.said, self.shown = work, said, shown


def rated(value: float) -> Callable[[dict[str, Any]], Any]:
    return lambda items: dict.fromkeys(items, value)


def by_answer(episode: dict[str, Any]) -> dict[str, float]:
    """A judge of the simplest kind."""
    return {call["call"]: 0.5 for call in episode["calls"]}


async def played(client: Client, number: int = 1, calls: int = 1, task: str = "t") -> list[str]:
    """Episodes that await a judgement."""
    names = []
    for _ in range(number):
        names.append(await client.open({"task": task, "judged": True}))
        for _ in range(calls):
            await client.chat(names[-1])
    for name in names:
        await client.control("POST", f"/episodes/{name}/seal")
    return names


def model(stub: JudgeStub, said: list[str], rest: Rest, budget: Budget, votes: int = 1) -> Model:
    how: dict[str, Any] = {"votes": votes, "budget": budget, "words": True, "say": said.append, "rest": rest}
    return Model(f"{stub.url}#grader", "Is it true?", **how)


@asynccontextmanager
async def at_work(
    client: Client, judge: Judge | JudgeStub, *, votes: int = 1, budget: str | None = None, ends: bool = True,
    **options: Any,
) -> AsyncIterator[Bench]:
    """A judge at work, which is interrupted at last."""
    said, shown, rest, spends = list[str](), list[str](), Rest(), Budget.parse(budget)
    if isinstance(judge, JudgeStub):
        judge = model(judge, said, rest, spends, votes)
    async with sdk.Client(client.app.url) as asks:
        work = Work(asks, judge, Options(**options), budget=spends, rest=rest, show=shown.append, say=said.append)
        task = asyncio.create_task(work.run())
        try:
            yield Bench(work, said, shown)
        finally:
            if ends:
                task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                pass
            finally:
                if isinstance(judge, Model):
                    await judge.close()


async def count(work: Work, outcome: str, number: int = 1) -> None:
    """Waits until so many came out so."""
    await eventually(lambda: work.counts[outcome] >= number)


async def test_a_model_judges_each_call(client: Client) -> None:
    (name,) = await played(client, calls=2)
    with judging(rated(0.6)) as grader:
        async with at_work(client, grader, votes=3) as bench:
            await count(bench.work, "judged")
    found = await client.record(name)
    assert (found["state"], found["reward"]) == ("ready", pytest.approx(1.2))
    assert len(grader.asked) == 6
    assert all("3 of 3 votes, spread 0.00" in one["note"] and "rubric " in one["note"] for one in found["rewards"])
    assert bench.shown and "1 judged" in bench.work.summary() and "600 tokens" in bench.work.summary()


@pytest.mark.parametrize("said", ["fine", '{"answer 1": NaN}', '{"answer 1": 7}', '{"a": 1}', 400])
async def test_a_failed_judgement_is_none(client: Client, said: Any) -> None:
    (name,) = await played(client)
    with judging(lambda items: said) as grader:
        async with at_work(client, grader, votes=3) as bench:
            await count(bench.work, "left")
    found = await client.record(name)
    assert (found["state"], found["rewards"]) == ("sealed", [])
    assert "0 of 3 votes are valid" in bench.said[0] and name in bench.said[0]


async def test_a_judge_that_is_of_two_minds_abstains(client: Client) -> None:
    (name,) = await played(client)
    values = iter([1.0, -1.0])
    with judging(lambda items: dict.fromkeys(items, next(values))) as grader:
        async with at_work(client, grader, votes=2, name="g") as bench:
            await count(bench.work, "without a verdict")
    found = await client.record(name)
    assert (found["state"], found["reason"]) == ("discarded", "not_judged")
    assert bench.work.counts["abstained"] == 1


async def test_a_group_is_judged_at_once_in_any_order(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.judging.GATHERS_S", 0.0)
    names = await played(client, 3)
    values = iter([-1.0, 0.0, 1.0])
    with judging(lambda items: {label: next(values) for label in items}) as grader:
        async with at_work(client, grader, relative=True) as bench:
            await count(bench.work, "judged", 3)
    (asked,) = grader.asked
    assert len(shown_in(asked)) == 3
    assert sorted([(await client.record(name))["reward"] for name in names]) == [-1.0, 0.0, 1.0]


async def test_seven_numbers_for_eight_answers_judge_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.judging.GATHERS_S", 0.0)
    names = await played(client, 8)
    with judging(lambda items: dict.fromkeys(list(items)[:7], 1.0)) as grader:
        async with at_work(client, grader, relative=True) as bench:
            await count(bench.work, "left", 8)
    assert {(await client.record(name))["state"] for name in names} == {"sealed"}


async def test_of_what_failed_the_latest_is_remembered(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge may be at work for years."""
    monkeypatch.setattr("ajet_sdk.judge.work.MOST_FAILED", 2)
    names = await played(client, 5)
    async with at_work(client, Function(lambda episode: None, "d"), parallel=2) as bench:
        await count(bench.work, "left", 5)
    assert set(bench.work._failed) < {*names} and len(bench.work._failed) == 2 and not bench.work._ended


async def test_a_function_and_a_command(client: Client, tmp_path: Path) -> None:
    names = await played(client, 2)
    code = "import json, sys; e = json.load(sys.stdin); print(json.dumps({c['call']: -0.5 for c in e['calls']}))"
    (tmp_path / "score.py").write_text(code)
    command = Function.of_command(f"python3 {tmp_path / 'score.py'}")
    for judge, value in ((Function(by_answer, "d"), 0.5), (command, -0.5)):
        async with at_work(client, judge, parallel=2) as bench:
            await count(bench.work, "judged", 2)
        assert {(await client.record(name))["reward"] for name in names} == {value}
        names = await played(client, 2)


@pytest.mark.parametrize(
    "found",
    [None, 1, {"other": 1}, {1: 1}, "say", {"CALL": 2}, {"CALL": "1"}, ZeroDivisionError(), SystemExit(3),
     asyncio.CancelledError(), GeneratorExit()],
)  # fmt: skip
async def test_a_function_that_says_what_is_no_verdict(client: Client, found: Any) -> None:
    (name,) = await played(client)

    def score(episode: dict[str, Any]) -> Any:
        if isinstance(found, BaseException):
            raise found
        if not isinstance(found, dict):
            return found
        return {episode["calls"][0]["call"] if key == "CALL" else key: value for key, value in found.items()}

    async with at_work(client, Function(score, "d")) as bench:
        await count(bench.work, "left")
    assert (await client.record(name))["state"] == "sealed"


async def test_a_function_may_change_what_it_is_given(client: Client) -> None:
    (name,) = await played(client)

    def score(episode: dict[str, Any]) -> dict[str, float]:
        return {episode["calls"].pop()["call"]: 0.5}

    async with at_work(client, Function(score, "d")) as bench:
        await count(bench.work, "judged")
    assert (await client.record(name))["reward"] == 0.5


async def test_what_takes_longer_than_its_lease_is_judged_once_here(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet_sdk.judge.work.LEASE_S", 0.05)
    (name,) = await played(client)
    leased, begun, go_on, ask = list[int](), list[str](), asyncio.Event(), sdk.Client.ask
    judged, again, late = asyncio.Event(), asyncio.Event(), list[Any]()

    async def asks(self: sdk.Client, route: str, *args: Any, **options: Any) -> Reply:
        if asyncio.current_task() in late:
            again.set()
        found = await ask(self, route, *args, **options)
        if route == "lease_judgements" and found.status == 200:
            leased.append(len(leased))
            if len(leased) == 3:
                go_on.set()
                late.append(asyncio.current_task())
                await judged.wait()  # and is heard of only after it was judged by the first
        return found

    monkeypatch.setattr(sdk.Client, "ask", asks)

    class Slow:
        digest = "d"

        async def judge(self, episode: Any) -> Any:
            begun.append(episode["episode"])
            await go_on.wait()
            return await Function(by_answer, "d").judge(episode)

    async with at_work(client, Slow(), parallel=3) as bench:
        await count(bench.work, "judged")
        judged.set()
        await again.wait()
    assert begun == [name] and bench.work.counts == {"judged": 1}


@pytest.mark.parametrize("command", ["exit 3", "echo fine", "echo null", "cat > /dev/null; echo '{\"c\": 1}'"])
async def test_a_command_that_fails(client: Client, command: str) -> None:
    (name,) = await played(client)
    async with at_work(client, Function.of_command(command)) as bench:
        await count(bench.work, "left")
    assert (await client.record(name))["state"] == "sealed"


class Odd(dict[str, Any]):
    """What raises wherever it is looked at."""

    def keys(self) -> Any:
        raise RuntimeError

    __iter__ = __repr__ = items = values = keys  # type: ignore[assignment]


@pytest.mark.parametrize("what", ["function", "hook"])
async def test_what_is_returned_can_only_fail_its_own_episode(client: Client, what: str) -> None:
    names = await played(client, 2)

    def odd(episode: dict[str, Any]) -> Any:
        if episode["episode"] == names[0]:
            return Odd(a=1) if what == "function" else {**episode, "calls": [Odd(call="c")]}
        return episode if what == "hook" else by_answer(episode)

    function, redact = (odd, None) if what == "function" else (by_answer, odd)
    async with at_work(client, Function(function, "d"), redact=redact) as bench:
        await count(bench.work, "judged")
        await count(bench.work, "left")
    assert [(await client.record(name))["reward"] for name in names] == [None, 0.5]


@pytest.mark.parametrize("what", ["function", "hook"])
async def test_what_hangs_costs_its_own_episode_alone(client: Client, what: str) -> None:
    names, free = await played(client, 2), threading.Event()

    def hangs(episode: dict[str, Any]) -> Any:
        if episode["episode"] == names[0]:
            free.wait()
        return episode if what == "hook" else by_answer(episode)

    function, redact = (hangs, None) if what == "function" else (by_answer, hangs)
    try:
        async with at_work(client, Function(function, "d", 5.0), redact=redact, timeout=5.0) as bench:
            await count(bench.work, "judged")
            await count(bench.work, "left")
    finally:
        free.set()
    assert f"{names[0]}: not judged, and left: no answer in 5 s" in bench.said
    assert [(await client.record(name))["reward"] for name in names] == [None, 0.5]


async def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """What it writes to ends with the last that has it open. It may need longer to begin than the first limit is."""
    os.mkfifo(pipe := tmp_path / "pipe")
    written, begun = asyncio.create_task(asyncio.to_thread(pipe.read_bytes)), tmp_path / "begun"
    for timeout in (1.0, 10.0, 100.0):
        if not begun.exists():
            judge = Function.of_command(f"exec > {pipe}; echo > {begun}; sleep 9999 & wait", timeout=timeout)
            with pytest.raises(Failed, match=r"TimeoutExpired|no answer in"):
                await judge.judge(UNIT)
    assert begun.exists() and await written == b""


async def test_what_is_redacted_reaches_no_judge_and_none_withdraws(client: Client) -> None:
    first, second = await played(client, 2)

    def clean(episode: dict[str, Any]) -> Any:
        if episode["episode"] == first:
            return None
        return {**episode, "calls": [{**call, "before": "(gone)"} for call in episode["calls"]]}

    with judging(rated(1)) as grader:
        async with at_work(client, grader, redact=clean) as bench:
            await count(bench.work, "withdrawn")
            await count(bench.work, "judged")
    assert {shown["question"] for one in grader.asked for shown in shown_in(one).values()} == {"(gone)"}
    assert (await client.record(first))["reason"] == "withdrawn"
    assert (await client.record(second))["reward"] == 1


@pytest.mark.parametrize("relative", [False, True])
async def test_a_model_whose_trainer_comes_after_it_does_not_judge_itself(
    client: Client, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    """The episode that it would judge tells of which model it is."""
    monkeypatch.setattr("ajet_proxy.core.ledger.judging.GATHERS_S", 0.0)
    (name,) = await played(client)
    with judging(rated(1)) as grader:
        judge = model(grader, [], Rest(), Budget.parse(None))
        judge.name = (await client.record(name))["calls"][0]["model"]
        with pytest.raises(AjetError, match="would judge itself"):
            async with at_work(client, judge, ends=False, relative=relative):
                pass
    assert not grader.asked and (await client.record(name))["rewards"] == []


async def test_a_judge_that_was_away_is_asked_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "BACKOFF_FIRST_S", 0.01)
    (name,) = await played(client)
    faults = iter([500, 503, 429])
    with judging(lambda items: next(faults, dict.fromkeys(items, 1.0))) as grader:
        async with at_work(client, grader) as bench:
            await count(bench.work, "judged")
    assert (await client.record(name))["reward"] == 1
    assert ["away" in line for line in bench.said] == [True, False] and "back" in bench.said[1]


async def test_what_a_judge_was_away_for_awaits_it_however_long(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its absence is no failure of the episode."""
    monkeypatch.setattr(judges, "LEASE_S", 0.0)
    monkeypatch.setattr("ajet_sdk.judge.work.LEASE_S", 0.01)
    (name,) = await played(client)
    faults = iter([503] * 6)  # each absence is made sure of by a request that asks nothing
    with judging(lambda items: next(faults, dict.fromkeys(items, 1.0))) as grader:
        async with at_work(client, grader) as bench:
            await count(bench.work, "judged")
    assert (await client.record(name))["reward"] == 1 and bench.work.counts["left"] == 3


async def test_what_a_judge_never_answers_to_holds_up_nothing_else(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its user has said something, so that it comes first."""
    monkeypatch.setattr(judges, "LEASE_S", 0.0)
    monkeypatch.setattr("ajet_sdk.judge.work.LEASE_S", 1.0)
    odd, *others = await played(client, 3)
    said = {"call": (await client.record(odd))["calls"][0]["call"], "text": "odd"}
    assert (await client.control("POST", "/feedback", said)).status == 200
    with judging(lambda items: 500 if "odd" in str(items) else dict.fromkeys(items, 1.0)) as grader:
        async with at_work(client, grader) as bench:
            await count(bench.work, "judged", 2)
            await count(bench.work, "left", 2)
    assert {(await client.record(name))["reward"] for name in others} == {1}
    assert bench.work.counts["left"] == 2 and (await client.record(odd))["state"] == "sealed"


async def test_an_interrupt_ends_what_is_in_flight_and_leases_nothing_more(client: Client) -> None:
    names = await played(client, 3)
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Slow:
        digest = "d"

        async def judge(self, episode: Any) -> Any:
            begun.set()
            await go_on.wait()
            return await Function(by_answer, "d").judge(episode)

    async with at_work(client, Slow()) as bench:
        await begun.wait()
        asyncio.get_running_loop().call_later(0.01, go_on.set)
    assert bench.work.counts["judged"] == 1
    states = sorted([(await client.record(name))["state"] for name in names])
    assert states == ["ready", "sealed", "sealed"]


async def test_a_judge_that_is_killed_loses_nothing(client: Client) -> None:
    """Its lease runs out, and another judge comes first or second: one of them counts."""
    (name,) = await played(client)
    lease = await client.control("POST", "/judgements/lease", {"lease_s": 0.05})
    assert lease.status == 200
    async with at_work(client, Function(by_answer, "d"), name="second") as bench:
        await count(bench.work, "judged")
    late = {"judge": "first", "rewards": [{"value": 1}]}
    answer = await client.control("POST", f"/episodes/{name}/judgement", late)
    assert (answer.status, answer.json["error"]["code"]) == (409, "already_judged")
    assert (await client.record(name))["reward"] == 0.5


async def test_a_judge_that_leaves_while_texts_are_made_has_leased_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, asked = Judgements._told, list[str]()

    async def one_alone(self: Judgements, asking: Any, episode: Any, silent: set[str]) -> Any:
        asked.append(episode.id)
        return await (told(self, asking, episode, silent) if len(asked) == 1 else asyncio.Event().wait())

    await played(client, 2)
    monkeypatch.setattr(Judgements, "_told", one_alone)
    leasing = asyncio.create_task(client.control("POST", "/judgements/lease", {"n": 2}))
    await eventually(lambda: len(asked) == 2)
    assert (await client.status())["traffic"]["leased"] == 2
    leasing.cancel()
    await client.until(lambda status: not status["traffic"]["leased"])


async def test_two_judges_of_one_episode(client: Client) -> None:
    (name,) = await played(client)

    async def judge_first(episode: Any) -> Any:
        body = {"judge": "other", "rewards": [{"value": -1}]}
        await client.control("POST", f"/episodes/{name}/judgement", body)
        return await Function(by_answer, "d").judge(episode)

    class Late:
        digest, judge = "d", staticmethod(judge_first)

    async with at_work(client, Late()) as bench:
        await count(bench.work, "judged by another")
    assert (await client.record(name))["reward"] == -1


async def test_of_very_many_calls_the_last_are_judged(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judgement holds no more rewards."""
    monkeypatch.setattr("ajet_sdk.judge.work.MAX_JUDGEMENTS", 2)
    monkeypatch.setattr("ajet_sdk.routes.MAX_JUDGEMENTS", 2)
    (name,) = await played(client, calls=3)
    async with at_work(client, Function(by_answer, "d")) as bench:
        await count(bench.work, "judged")
    found = await client.record(name)
    calls = [call["call"] for call in found["calls"]]
    assert {one["call"] for one in found["rewards"]} == {*calls[1:]} and len(calls) == 3


async def test_a_judgement_that_is_refused_is_not_made_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pays for it a second time, and the judge goes on."""
    monkeypatch.setattr("ajet_sdk.judge.work.LEASE_S", 4.0)
    first, second = await played(client, 2)
    judged = list[str]()

    def score(episode: dict[str, Any]) -> Any:
        judged.append(episode["episode"])
        return by_answer(episode)

    def refused(name: str, rewards: Any = (), *rest: Any) -> Judgement:
        return Judgement(name, rewards * (501 if judged[-1] == second else 1), *rest)

    monkeypatch.setattr("ajet_sdk.judge.work.Judgement", refused)
    async with at_work(client, Function(score, "d")) as bench:
        await count(bench.work, "judged")
        await asyncio.sleep(5.0)  # both leases have run out
    assert judged == [second, first] and bench.work.counts == {"judged": 1, "not taken": 1}
    assert bench.said == [f"{second}: its judgement is not taken: two rewards are of one call, of one agent, or of the "
                          "episode"]  # fmt: skip


@pytest.mark.parametrize("fooled", [True, False])
async def test_probes_stop_a_judge_that_always_says_1(
    client: Client, monkeypatch: pytest.MonkeyPatch, fooled: bool
) -> None:
    monkeypatch.setattr("ajet_sdk.judge.work.PROBE_EVERY", 2)
    await played(client, 6)

    def answer(items: dict[str, Any]) -> dict[str, float]:
        return {label: 1.0 if fooled or len(shown["answer"]) > 1 else -1.0 for label, shown in items.items()}

    with judging(answer) as grader:
        if fooled:
            with pytest.raises(AjetError, match="cannot be believed"):
                async with at_work(client, grader, ends=False):
                    pass
            assert any(shown["answer"] == ":" for one in grader.asked for shown in shown_in(one).values())
        else:
            async with at_work(client, grader) as bench:
                await count(bench.work, "judged", 6)


async def test_a_budget_that_is_used_up_waits_for_the_next_day(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = await played(client, 2)
    with judging(rated(1)) as grader:
        async with at_work(client, grader, budget="100/day") as bench:
            await eventually(lambda: any("used up" in line for line in bench.said))
    assert len(grader.asked) == 1
    assert sorted([(await client.record(name))["state"] for name in names]) == ["ready", "sealed"]


async def test_a_budget_is_of_all_judges_of_a_name_and_outlives_them(client: Client) -> None:
    await played(client, 4)
    with judging(rated(1)) as grader:
        async with at_work(client, grader, name="g", budget="250/day") as bench:
            await count(bench.work, "judged", 3)  # an earlier interruption might lose a lease that is being answered
        async with at_work(client, grader, name="g", budget="250/day") as bench:
            await eventually(lambda: any("used up" in line for line in bench.said))
        assert len(grader.asked) == 3
        assert (await client.status())["traffic"]["tokens_today"] == {"g": 300}
        async with at_work(client, grader, name="h", budget="250/day") as bench:
            await count(bench.work, "judged")


async def test_what_a_judge_used_in_vain_counts_with_its_next_judgement(client: Client) -> None:
    await played(client, 2)
    answers = iter(["fine"])
    with judging(lambda items: next(answers, dict.fromkeys(items, 1.0))) as grader:
        async with at_work(client, grader) as bench:
            await count(bench.work, "judged")
            await count(bench.work, "left")
    assert (await client.status())["traffic"]["tokens_today"] == {"judge": 200}


async def test_labels_are_judged_within_the_budget(client: Client) -> None:
    (name,) = await played(client)
    gold = [{"question": "q", "answer": "a", "value": 1}] * 3
    with judging(rated(1)) as grader:
        async with at_work(client, Function(by_answer, "d"), budget="200/day") as bench:
            bench.work.judge = model(grader, bench.said, Rest(), bench.work.budget)
            await count(bench.work, "judged")
            checking = asyncio.create_task(bench.work.check(gold))
            await eventually(lambda: any("used up" in line for line in bench.said))
            checking.cancel()
            await bench.work.judge.close()
    assert len(grader.asked) == 2
    assert (await client.record(name))["state"] == "ready"


async def test_it_tells_how_it_agrees_with_labels(client: Client) -> None:
    gold = [json.loads(f'{{"question": "q", "answer": "{"a" * n}", "value": {n}}}') for n in range(1, 5)]
    with judging(lambda items: {label: len(one["answer"]) / 4 for label, one in items.items()}) as grader:
        async with at_work(client, grader) as bench:
            line = await bench.work.check(gold)
    assert line == "4 of 4 labelled answers judged; of 6 pairs 100% in the same order"


async def test_a_refusal_of_the_judge_ends_it(client: Client) -> None:
    await played(client)
    with judging(lambda items: 401) as grader, pytest.raises(AjetError, match="the judge at"):
        async with at_work(client, grader, ends=False):
            pass


async def test_a_judge_that_likes_length_shows_in_the_report(client: Client) -> None:
    lengths = iter([10, 20, 30])
    await played(client, 3)

    def clean(episode: dict[str, Any]) -> Any:
        return {**episode, "calls": [{**call, "answer": "a" * next(lengths)} for call in episode["calls"]]}

    with judging(lambda items: {label: len(one["answer"]) / 30 for label, one in items.items()}) as grader:
        async with at_work(client, grader, redact=clean) as bench:
            await count(bench.work, "judged", 3)
    assert "correlation with length +1.00" in bench.work.summary()


@pytest.mark.parametrize("hook", [
    lambda episode: {"episode": "another"}, lambda episode: {**episode, "episode": "another"},
    lambda episode: {"episode": episode["episode"], "calls": []}, lambda episode: {**episode, "calls": None},
    lambda episode: {**episode, "calls": [{"call": one["call"]} for one in episode["calls"]]},
    lambda episode: {**episode, "calls": [{**one, "call": "another"} for one in episode["calls"]]},
    lambda episode: {**episode, "calls": [one["answer"] for one in episode["calls"]]},
    lambda episode: {**episode, "calls": [{**one, "answer": None} for one in episode["calls"]]},
    lambda episode: {**episode, "calls": [{**one, "call": [1]} for one in episode["calls"]]},
    lambda episode: {**episode, "calls": [{**one, "feedback": {"value": "good"}} for one in episode["calls"]]},
    lambda episode: {**episode, "feedback": {"text": 1}}, lambda episode: {**episode, "feedback": 1},
    lambda episode: [one.pop("answer") for one in episode["calls"]] and episode,
])  # fmt: skip
async def test_an_episode_whose_hook_fails_is_left(client: Client, hook: Callable[[dict[str, Any]], Any]) -> None:
    (name,) = await played(client)
    async with at_work(client, Function(by_answer, "d"), redact=hook) as bench:
        await count(bench.work, "left")
    assert "--redact" in bench.said[0]
    assert (await client.record(name))["state"] == "sealed"


@pytest.mark.parametrize(("usage", "tokens"), [({"usage": {"total_tokens": 7}}, 7), ({"usage": None}, 0), ({}, 0), *(
    ({"usage": {"total_tokens": odd}}, 0) for odd in (math.inf, -math.inf, math.nan, -7, 2 * 10**12, 10**400, "x", [])
)])  # fmt: skip
def test_an_answer_counts_whether_or_not_its_tokens_are_told(usage: dict[str, Any], tokens: int) -> None:
    content = json.dumps({"choices": [{"message": {"content": "said"}}]} | usage).encode()
    assert judges.read(Reply(200, {}, content)) == ("said", tokens or len(content) // 4)
    assert judges.read(Reply(200, {}, b"<html>")) == (None, 1)


@pytest.mark.parametrize("body", ['"a page"', "[]", '{"object": "list"}', '{"data": [1]}'])
async def test_what_is_no_judge_is_named_at_the_start(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(*_: Any) -> Reply:
        return Reply(200, {}, body.encode())

    monkeypatch.setattr(Model, "_send", send)
    judge = Model("http://127.0.0.1:1/v1", "r", votes=1, budget=Budget(None), words=True, say=str, rest=Rest())
    with pytest.raises(AjetError, match="is no OpenAI-compatible address"):
        await judge.open()
    await judge.close()
