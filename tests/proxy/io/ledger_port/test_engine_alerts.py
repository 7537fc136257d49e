"""An engine that does not tell what it sampled is said, in the ledger's process, whoever asked it; and no other one."""

from __future__ import annotations

import pytest
from yarl import URL

from ajet_proxy.core.ledger.events import EpisodeOpened
from ajet_proxy.io.ledger_port.cancellation import ignore
from ajet_proxy.io.ledger_port.local import Gone
from ajet_sdk.routes import OpenEpisode, Policy
from ajet_sdk.untrainable import GIVES_LOGPROBS, GIVES_TOKEN_IDS, UNTRAINABLE
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.wire import send
from tests.proxy.io.front import CHAT, Front
from tests.proxy.io.ledger_port.test_local import asking

BODY = {"model": "stub", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
MESSAGES = "/v1/messages"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "said", "remedy"), [
    ("no_token_ids", "gives no token ids (no_token_ids)", GIVES_TOKEN_IDS),
    ("no_logprobs", "does not give a logprob for each token (no_logprobs)", GIVES_LOGPROBS),
    ("refuses_ids", "refuses requests for token ids and logprobs (unaskable)", UNTRAINABLE["unaskable"].remedy),
    ("refuses_logprobs", "refuses requests for token ids and logprobs (unaskable)", UNTRAINABLE["unaskable"].remedy),
])  # fmt: skip
async def test_an_alert_names_the_engine_until_it_tells(
    stub: EngineStub, front: Front, kind: str, said: str, remedy: str, stream: bool
) -> None:
    stub.faults = [Fault(kind, times=4)]
    for path in (CHAT, MESSAGES):
        assert (await send(front.url + path, body=BODY | {"stream": stream})).status == 200
    (line,) = front.store.trouble.values()
    assert line == f"{stub.url}{CHAT} {said}, so nothing that it samples can be trained: {remedy}"
    stub.faults = []
    assert (await send(front.url + CHAT, body=BODY | {"stream": stream})).status == 200
    assert front.store.trouble == {}


async def test_a_judge_an_evaluation_and_an_engine_that_is_unwell_raise_none() -> None:
    async with EngineStub(models=()) as stub, Front(stub.url) as front:
        stub.faults = [Fault("no_token_ids", times=3)]
        await send(f"{front.url}/e/eval{CHAT}", body=BODY, headers={"X-AJet-Eval": "1"})
        opening = OpenEpisode(members={"solver": "policy"})
        front.store.post(front.store.commands.open_episode(opening, episode="judged", at=front.clock.now(), tenant=""))
        await send(f"{front.url}/e/judged{CHAT}", body=BODY)
        assert len(front.of(EpisodeOpened)) == 2 and front.lost == ["no_token_ids"] * 2
        assert front.store.trouble == {}
        await send(f"{front.url}/e/other{CHAT}", body=BODY)
        assert len(front.store.trouble) == 1
        stub.faults = [Fault("status", times=9)]
        front.store.trouble.clear()
        await send(f"{front.url}/e/other{CHAT}", body=BODY)
        assert front.store.trouble == {}


async def test_an_engine_that_serves_no_more_is_not_spoken_of() -> None:
    async with EngineStub() as stub, EngineStub() as better, Front() as front:
        for engine in (stub, better):
            announced = Policy(model="stub", version=1, upstreams=(engine.url,))
            front.store.post(front.store.commands.trainers.announce(announced, at=front.clock.now()))
            assert front.store.trouble == {}
            engine.faults = [Fault("no_token_ids")]
            await send(front.url + CHAT, body=BODY)
            (line,) = front.store.trouble.values()
            assert line.startswith(engine.url)


@pytest.mark.parametrize("engine", ["http://engine:80", "https://Engine:443/llm", "http://engine:8000"])
async def test_an_engine_is_known_however_its_address_is_written(engine: str) -> None:
    front = Front(engine)
    answered = str(URL(f"{engine}{CHAT}", encoded=True))
    async with front.ledger_port.begin(asking(choices=1), ignore) as begun:
        front.ledger_port.lose([Gone(begun.episode, begun.calls[0], "no_token_ids", engine=answered)])
    for closed in (True, False):
        front.close_gate() if closed else front.open_gate(1)
        assert [line.partition(" ")[0] for line in front.store.trouble.values()] == [answered]
