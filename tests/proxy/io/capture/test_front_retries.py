"""A request that is sent again makes one call, and what rides on it counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest import mock

import pytest

from ajet_proxy.core.ledger.events import CallStarted, Event, RewardGiven
from ajet_proxy.core.ledger.retries import UnseenRequests
from ajet_proxy.io.ledger_port.remote_server import PortServer
from ajet_sdk.errors import NotReady, OverQuota
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.wire import Answer, send
from tests.proxy.io.front import BODY, CHAT, Front, leave, until

pytestmark = pytest.mark.usefixtures("flying")

AGAIN = {"X-Stainless-Retry-Count": "1"}
KEY = {"Idempotency-Key": "one"}


async def test_a_retry_that_only_counts_itself_rewards_once(front: Front) -> None:
    url, models = f"{front.url}/e/ep{CHAT}", f"{front.url}/e/ep/v1/models"
    for reward, count in (("0.5", "1"), ("0.5", "2"), ("0.25", "1")):
        await send(url, body=BODY, headers={"X-AJet-Reward": reward, "X-Stainless-Retry-Count": count})
    assert [event.value for event in front.of(RewardGiven)] == [0.5, 0.25]
    for _ in range(2):  # said twice, and not sent again: two rewards
        await send(models, method="GET", headers={"X-AJet-Reward": "0.1"})
    await send(models, method="GET", headers={"X-AJet-Reward": "0.1"} | AGAIN)
    assert [event.value for event in front.of(RewardGiven)] == [0.5, 0.25, 0.1, 0.1]


async def test_another_body_under_the_same_key_is_another_request(front: Front) -> None:
    """As from an agent that sends one key with everything."""
    url = f"{front.url}/e/ep{CHAT}"
    for seed, reward in ((1, "0.5"), (1, "0.5"), (2, "0.5"), (3, "0.25")):
        answer = await send(url, body=BODY | {"seed": seed}, headers=KEY | {"X-AJet-Reward": reward})
        assert answer.status == 200
    assert [event.value for event in front.of(RewardGiven)] == [0.5, 0.5, 0.25]
    assert len(counted(front)) == 3 and front.lost == ["retried"]
    told = await send(url, body=BODY | {"seed": 3}, headers=KEY | {"X-AJet-Reward": "0.75"})
    assert (told.status, told.json()["error"]["code"]) == (409, "reward_exists")


def counted(front: Front, episode: str = "ep") -> list[str]:
    """The calls that count."""
    entries = front.store.state.episodes[episode].transcript.calls.items()
    return [name for name, entry in entries if entry.state == "complete"]


def call_of(answer: Answer) -> str:
    assert answer.status == 200
    return answer.headers["x-ajet-call"]


@pytest.mark.parametrize("headers", [AGAIN, KEY], ids=["counted", "keyed"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_of_an_answer_that_was_whole_and_lost_on_the_way(
    stub: EngineStub, front: Front, headers: dict[str, str], stream: bool
) -> None:
    """The client gets a fresh answer, and that one counts: it is the one that the client goes on from."""
    body = BODY | {"stream": stream}
    first = await send(f"{front.url}/e/ep{CHAT}", body=body, headers=KEY)
    again = await send(f"{front.url}/e/ep{CHAT}", body=body, headers=headers)
    assert counted(front) == [call_of(again)] != [call_of(first)]
    assert len(stub.llm_requests()) == 2
    assert front.lost == ["retried"]


@pytest.mark.parametrize("headers", [AGAIN, KEY], ids=["counted", "keyed"])
async def test_a_retry_while_the_first_attempt_is_being_answered(headers: dict[str, str]) -> None:
    """Both get their answers; the last to be asked counts, whichever ends first."""
    for first_ends_first in (False, True):
        async with EngineStub() as stub, Front(stub.url) as front:
            stub.faults += [Fault("slow", delay_s=0.1 if first_ends_first else 0.4), Fault("slow", delay_s=0.25)]
            first = asyncio.create_task(send(f"{front.url}/e/ep{CHAT}", body=BODY, headers=KEY))
            await until(stub.llm_requests)
            again = await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers=headers)
            assert call_of(await first) != call_of(again)
            assert counted(front) == [call_of(again)]
        assert set(front.lost) == {"retried"}


async def test_a_retry_of_an_attempt_whose_client_has_left() -> None:
    async with EngineStub(delay_s=0.2) as stub, Front(stub.url) as front:
        asking = asyncio.create_task(send(f"{front.url}/e/ep{CHAT}", body=BODY))
        await until(stub.llm_requests)
        await leave(asking)
        again = await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers=AGAIN)
        assert counted(front) == [call_of(again)]
        await until(lambda: stub.llm_requests()[0].cancelled)


@pytest.mark.parametrize(("headers", "calls"), [(KEY, 1), (AGAIN, 2)], ids=["keyed", "counted"])
async def test_a_retry_in_another_protocol_is_known_by_its_key_alone(
    front: Front, headers: dict[str, str], calls: int
) -> None:
    said = {"model": "stub", "messages": BODY["messages"], "max_tokens": 4}
    for path in (CHAT, "/v1/messages"):
        await send(f"{front.url}/e/ep{path}", body=said, headers=headers)
    assert len(counted(front)) == calls


class Full:
    """A quota that refuses the first `refused` requests behind the first one."""

    def __init__(self, refused: int) -> None:
        self.refused, self.passed = refused, 0

    def check(self, events: Sequence[Event]) -> None:
        if not any(isinstance(event, CallStarted) for event in events):
            return
        if self.passed and self.refused:
            self.refused -= 1
            raise OverQuota("come back later", retry_after=1.0)
        self.passed += 1


async def insist(url: str, body: dict[str, object], headers: dict[str, str], tries: int = 20) -> Answer:
    """As an SDK does it: once more, counted, after each answer that says so."""
    for count in range(tries):
        answer = await send(url, body=body, headers=headers | {"X-Stainless-Retry-Count": str(count)})
        if answer.status not in (429, 503):
            return answer
        await asyncio.sleep(0.01)
    raise AssertionError(f"refused {tries} times")


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_retry_of_what_a_quota_refused_takes_no_sibling_out(front: Front, keyed: bool, at_once: bool) -> None:
    """A best of 8, of which each is answered in the end: 8 calls."""
    front.store.check = Full(5).check  # type: ignore[method-assign]
    url = f"{front.url}/e/ep{CHAT}"
    each = [insist(url, BODY, {"Idempotency-Key": f"key {n}"} if keyed else {}) for n in range(8)]
    answers = await asyncio.gather(*each) if at_once else [await one for one in each]
    assert counted(front) == [call for call in counted(front) if call in set(map(call_of, answers))]
    assert len(counted(front)) == 8 and front.lost == []
    again = await send(url, body=BODY | {"seed": 2})
    third = await send(url, body=BODY | {"seed": 2}, headers=AGAIN)
    assert call_of(again) not in counted(front) and call_of(third) in counted(front), "a true retry is known still"


async def test_a_retry_of_what_waited_at_the_gate_takes_no_sibling_out(front: Front) -> None:
    first = await send(f"{front.url}/e/ep{CHAT}", body=BODY)
    front.close_gate()
    waiting = asyncio.create_task(send(f"{front.url}/e/ep{CHAT}", body=BODY))
    await until(lambda: front.gate.waiting)
    await leave(waiting)
    await until(lambda: not front.gate.waiting)
    front.open_gate(1)
    again = await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers=AGAIN)
    assert counted(front) == [call_of(first), call_of(again)]


@pytest.mark.parametrize("why", ["the daemon was away", "a worker died", "no room for the body"])
async def test_a_retry_of_what_may_never_have_been_read_takes_no_sibling_out(front: Front, why: str) -> None:
    url = f"{front.url}/e/ep{CHAT}"
    first = await send(url, body=BODY)
    await until(lambda: not front.store.state.episodes.unsent)
    if why == "the daemon was away":
        front.store.post(front.store.commands.restarted(front.clock.now()))
        front.ledger_port._unseen = UnseenRequests(front.clock.now())  # as a daemon has it that has just started
    elif why == "a worker died":
        PortServer(front.ledger_port, notify=print, more={}, gone=lambda: None).lost()
    else:
        front.budget.look(0)
        refused = await send(url, body=BODY | {"user": "u" * 2_000_000})
        assert refused.status == 503
    again = await send(url, body=BODY, headers=AGAIN)
    assert counted(front) == [call_of(first), call_of(again)]


async def test_one_request_makes_one_call_however_often_it_is_sent_after_it_was_refused_once(front: Front) -> None:
    url = f"{front.url}/e/ep{CHAT}"
    with mock.patch.object(front.store, "check", side_effect=OverQuota("come back later", retry_after=1.0)):
        assert (await send(url, body=BODY)).status == 429
    for count in ("1", "2", "3"):
        answer = await send(url, body=BODY, headers={"X-Stainless-Retry-Count": count})
    assert counted(front) == [call_of(answer)]


async def test_a_reward_that_the_disk_refused_is_given_by_the_retry(front: Front) -> None:
    """Its twin, of the same words, was given before and stays another reward."""
    url, reward = f"{front.url}/e/ep/v1/models", {"X-AJet-Reward": "0.1"}
    await send(f"{front.url}/e/ep{CHAT}", body=BODY)
    assert (await send(url, method="GET", headers=reward)).status == 200
    with mock.patch.object(front.store, "check", side_effect=NotReady("no disk")):
        assert (await send(url, method="GET", headers=reward)).status == 503
    for count, rewards in (("1", 2), ("2", 2), ("1", 2)):
        again = await send(url, method="GET", headers=reward | {"X-Stainless-Retry-Count": count})
        assert (again.status, len(front.of(RewardGiven))) == (200, rewards)


class Counting:
    """Quotas that only note the tokens of what no event tells of."""

    def __init__(self) -> None:
        self.tokens: list[tuple[str, int]] = []

    def use(self, tenant: str, tokens: int, at: float) -> None:
        self.tokens.append((tenant, tokens))


async def test_an_answer_that_a_retry_has_replaced_meanwhile_was_used_all_the_same() -> None:
    async with EngineStub(delay_s=0.3) as stub, Front(stub.url) as front:
        front.store.quotas = quotas = Counting()
        first = asyncio.ensure_future(send(f"{front.url}/e/ep{CHAT}", body=BODY))
        await until(lambda: front.running == 1)
        second = await send(f"{front.url}/e/ep{CHAT}", body=BODY, headers=AGAIN)
        assert ((await first).status, second.status) == (200, 200)
        usage = second.json()["usage"]
    assert len(counted(front)) == 1
    assert quotas.tokens == [("", usage["prompt_tokens"] + usage["completion_tokens"])]


async def test_a_refused_request_of_a_long_name_costs_little_memory(front: Front) -> None:
    front.store.full = True
    for name in ("x", "y", "y"):
        answer = await send(front.url + CHAT, body=BODY | {"user": name * 1_000_000})
        assert answer.status == 503
    noted = front.ledger_port._unseen.noted
    assert sorted(noted.values()) == [1, 2] and all(len(part) < 300 for name in noted for part in name)
