"""Episodes: opened, rewarded, settled on leaving."""

from __future__ import annotations

from typing import Any

import pytest

import ajet_sdk
from ajet_sdk import aio, errors
from ajet_sdk.play.episode import Outcome
from ajet_sdk.rewards.blame import reason_of
from ajet_sdk.rewards.numbers import finite
from tests.kit.control_stub import DROP, LOSE, ControlStub, Say
from tests.kit.ports import free_port


async def within(episode: Any, agent: Any) -> None:
    """Runs ``agent(ep)`` within the episode's block."""
    async with episode as ep:
        await agent(ep)


async def test_an_episode_from_opening_to_reward(stub: ControlStub) -> None:
    async with aio.episode(task="gsm8k/17", model="m", agent="a", metadata={"seed": 1}, idle_timeout=5) as ep:
        assert (ep.id, ep.task, ep.policy_version) == ("ep-0", "gsm8k/17", 3)
        assert (ep.base_url, ep.api_key) == (f"{stub.url}/v1", "ajet-ep-0")
        assert "ep-0" in repr(ep)
        await ep.heartbeat()
        await ep.reward(1.0)
        assert ep.outcome == Outcome(reward=1.0)
    assert stub.heard[0].body.pop("id").startswith("ep-"), "what is asked for again is opened once"
    assert stub.heard[0].body == {
        "task": "gsm8k/17", "model": "m", "agent": "a", "metadata": {"seed": 1}, "idle_timeout": 5.0,
    }
    assert [heard.path.rsplit("/", 1)[1] for heard in stub.heard] == ["episodes", "heartbeat", "rewards"]
    assert stub.heard[-1].headers["authorization"] == "Bearer ajet-ep-0"
    record = stub.episodes["ep-0"]
    assert (record["state"], record["reward"]) == ("ready", 1.0)


async def test_without_a_with_block(stub: ControlStub) -> None:
    ep = await aio.episode("t")
    await ep.reward(0.25, final=False, call="c", agent="a", note="n", state="s")
    await ep.reward(0.5, final=False, model="m")
    assert (ep.outcome, stub.heard[-1].body["model"]) == (None, "m")
    assert (await ep.record(tokens=True))["state"] == "open"
    await ep.seal()
    await ep.seal()  # twice is once
    await ep.aclose()
    assert stub.episodes["ep-0"]["state"] == "ready"
    assert {**stub.heard[1].body, "id": None} == {
        "value": 0.25, "call": "c", "agent": "a", "final": False, "note": "n", "id": None, "state": "s",
    }


def test_the_environment_of_a_program(stub: ControlStub) -> None:
    with ajet_sdk.episode("t") as ep:
        assert ep.env() == {
            "OPENAI_BASE_URL": f"{stub.url}/v1",
            "OPENAI_API_BASE": f"{stub.url}/v1",
            "OPENAI_API_KEY": "ajet-ep-0",
            "ANTHROPIC_BASE_URL": stub.url,
            "ANTHROPIC_API_KEY": "ajet-ep-0",
            "AJET_PROXY_URL": stub.url,
            "AJET_EPISODE": "ep-0",
            "AJET_TASK": "t",
            "AJET_EXTRA": "from-the-proxy",
        }
        ep.reward(1)
    with ajet_sdk.episode() as ep:
        assert ep.env()["AJET_TASK"] == ""
        ep.abort()


async def test_leaving_without_a_reward_aborts(stub: ControlStub) -> None:
    async with aio.episode("t") as ep:
        pass
    assert ep.outcome == Outcome(aborted="left without a reward")
    assert stub.episodes["ep-0"]["detail"] == "left without a reward"


async def test_an_exception_aborts_with_its_reason(stub: ControlStub) -> None:
    with pytest.raises(ValueError, match="no answer"):
        async with aio.episode("t"):
            raise ValueError("no answer \ud800")
    assert stub.episodes["ep-0"]["detail"] == "ValueError: no answer ?"


async def test_rewards_that_are_not_final_are_sealed_on_leaving(stub: ControlStub) -> None:
    async with aio.episode("t") as ep:
        await ep.reward(0.25, final=False)
        await ep.reward(0.5, final=False)
    assert ep.outcome == Outcome(reward=0.75)
    assert stub.episodes["ep-0"]["state"] == "ready"


async def test_step_rewards_add_to_the_final_one_and_a_final_one_corrects(stub: ControlStub) -> None:
    async with aio.episode("t") as ep:
        await ep.reward(0.25, final=False)
        await ep.reward(1)
        await ep.reward(2)
    assert ep.outcome == Outcome(reward=2.25)
    assert stub.episodes["ep-0"]["reward"] == 2.25


async def test_a_reward_from_elsewhere_is_left_as_it_is(stub: ControlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    async with aio.episode("t") as ep:
        for name, value in ep.env().items():
            monkeypatch.setenv(name, value)
        await aio.reward(0.5)
    assert ep.outcome == Outcome(reward=0.5)
    assert stub.episodes["ep-0"]["state"] == "ready"


async def test_an_exception_after_the_final_reward_leaves_it(stub: ControlStub) -> None:
    async def agent(ep: Any) -> None:
        await ep.reward(1.0)
        raise ValueError("late")

    ep = aio.episode("t")
    with pytest.raises(ValueError, match="late"):
        await within(ep, agent)
    assert stub.episodes["ep-0"]["state"] == "ready"


async def test_an_episode_that_the_proxy_discarded_meanwhile(stub: ControlStub) -> None:
    async with aio.episode("t") as ep:
        stub.episodes["ep-0"].update(state="discarded", reason="idle_timeout")
    assert ep.outcome == Outcome(aborted="discarded by the proxy: idle_timeout", discarded="idle_timeout")

    async def too_late(ep: Any) -> None:
        stub.episodes["ep-1"].update(state="discarded", reason="idle_timeout")
        await ep.reward(1.0)

    with pytest.raises(errors.Conflict, match="idle_timeout"):
        await within(aio.episode("t"), too_late)


async def test_an_abort_is_once_and_never_after_the_seal(stub: ControlStub) -> None:
    ep = await aio.episode("t")
    await ep.abort("why")
    await ep.abort("again")
    assert stub.episodes["ep-0"]["detail"] == "why"
    with pytest.raises(errors.Conflict):
        await ep.seal()
    await ep.aclose()
    async with aio.episode("t") as ep:
        await ep.reward(1.0)
        with pytest.raises(errors.Conflict):
            await ep.abort()


async def test_after_its_end_an_episode_can_be_read_and_the_proxy_says_what_is_too_late(stub: ControlStub) -> None:
    async with aio.episode("t") as ep:
        await ep.abort("enough")
    with pytest.raises(errors.Conflict, match="discarded"):
        await ep.reward(1.0)
    assert (await ep.record())["state"] == "discarded"
    await ep.aclose()


async def test_a_failing_abort_does_not_hide_the_exception(stub: ControlStub) -> None:
    seen = []

    async def agent(ep: Any) -> None:
        seen.append(ep)
        stub.faults.extend([DROP] * 9)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await within(aio.episode("t", deadline=0.2), agent)
    assert seen[0].outcome is None


@pytest.mark.parametrize("fault", [LOSE, DROP, Say(503, {}, {"Retry-After": "0.1"})], ids=str)
async def test_a_reward_counts_once_whatever_happens_to_it(stub: ControlStub, fault: str | Say) -> None:
    async with aio.episode("t") as ep:
        stub.faults.extend([fault, fault])
        await ep.reward(1.0)
    assert stub.count("POST", "/rewards") == 3
    assert len({heard.body["id"] for heard in stub.heard[1:]}) == 1
    assert len(stub.episodes["ep-0"]["rewards"]) == 1


@pytest.mark.parametrize("ending", ["abort", "seal"])
async def test_sealing_and_aborting_survive_a_lost_answer(stub: ControlStub, ending: str) -> None:
    async with aio.episode("t") as ep:
        await ep.reward(1.0, final=False)
        stub.faults.append(LOSE)
        await getattr(ep, ending)()
    assert stub.episodes["ep-0"]["state"] == {"abort": "discarded", "seal": "ready"}[ending]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", None, [], b"1", 10**400])
async def test_what_is_no_reward_is_refused_here(stub: ControlStub, value: Any) -> None:
    with pytest.raises(errors.BadRequest, match="finite number"):
        async with aio.episode("t") as ep:
            await ep.reward(value)
    assert stub.count("POST", "/rewards") == 0
    assert stub.episodes["ep-0"]["state"] == "discarded"


async def test_opening_at_what_is_no_proxy(stub: ControlStub) -> None:
    for answer in ({"hello": 1}, [], "text", {"episode": "e", "base_url": "u", "api_key": "k", "policy_version": None}):
        stub.faults.append(Say(200, answer))
        with pytest.raises(errors.AjetError, match="not an ajet proxy"):
            await aio.episode("t")
    ep = await aio.episode("t")
    for answer in ([], "OK", ""):
        for ask in (ep.record, lambda: ep.reward(1.0), ep.seal, ep.abort):
            stub.faults.append(Say(200, answer))
            with pytest.raises(errors.AjetError, match="not an ajet proxy"):
                await ask()
    await ep.aclose()


async def test_outside_of_any_episode(stub: ControlStub) -> None:
    for act in (aio.reward(1.0), aio.abort()):
        with pytest.raises(errors.NotFound, match="Start the program with `ajet run`") as caught:
            await act
        assert caught.value.code == "no_episode"
    assert not stub.heard


async def test_with_no_proxy_a_reward_raises_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AJET_PROXY_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(errors.ProxyUnreachable, match=r"in 0\.3 s"):
        await aio.reward(1.0, episode="ep-0", deadline=0.3)


def test_numbers_and_reasons() -> None:
    class Scalar:
        def __float__(self) -> float:
            return 0.5

    assert [finite(value) for value in (True, 3, 0.25, Scalar())] == [1.0, 3.0, 0.25, 0.5]
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(reason_of(ValueError("x" * 9999))) == 500
