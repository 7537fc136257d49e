"""A real vLLM behind the real proxy: the agent cannot tell the difference, and what is stored is what was sampled.

Every request of the tapes goes to the engine directly and through the proxy, with one seed. The stored ids and
logprobs must be those that the engine reports to a direct question, and a forward pass of the same weights in
transformers must give the same logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from ajet_sdk.frame import decode_batch
from tests.e2e import asking
from tests.e2e.conftest import Engine
from tests.kit import record_tapes, wire
from tests.kit.proxy_process import ProxyProcess
from tests.kit.rig import Rig

pytestmark = pytest.mark.slow

CASES = {name: (route, body) for name, route, body in record_tapes.cases()}
CAPTURED = asking.captured(CASES)
BENT = ("structured_outputs", "tool_choice", "bad_words", "min_tokens")
"""What changes the distribution that is sampled from."""
FREE = [name for name in CAPTURED if not any(word in CASES[name][1] for word in BENT)]


@pytest.fixture(scope="module")
def proxy(vllm: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(vllm.url, tmp_path_factory.mktemp("capture") / "data") as running:
        yield running
        assert "Traceback" not in running.errors()


@pytest.fixture(scope="module")
def rig(proxy: ProxyProcess) -> Iterator[Rig]:
    with Rig(proxy.url) as hands:
        yield hands


@pytest.fixture(scope="module")
def through(proxy: ProxyProcess) -> dict[str, wire.Answer]:
    """Every case asked through the proxy, each in an episode that bears its name."""
    return asking.ask_all(proxy.url, "/e/{}", CASES)


@pytest.fixture(scope="module")
def direct(vllm: Engine) -> dict[str, wire.Answer]:
    return asking.ask_all(vllm.url, "", CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_agent_sees_the_engines_own_answer(
    name: str, through: dict[str, wire.Answer], direct: dict[str, wire.Answer], proxy: ProxyProcess, vllm: Engine
) -> None:
    asking.once_alike(
        partial(asking.the_agent_sees, named=name in CAPTURED),
        (through[name], direct[name]),
        lambda number: asking.both(name, number, proxy.url, vllm.url, *CASES[name]),
    )


@pytest.mark.parametrize("name", CAPTURED)
def test_what_is_stored_is_what_the_engine_reports(
    name: str, through: dict[str, wire.Answer], vllm: Engine, rig: Rig
) -> None:
    asking.stored_is_reported(name, CASES, rig.record(name)["calls"], through[name], vllm.url)


def test_a_forward_pass_gives_the_same_logprobs(through: dict[str, wire.Answer], vllm: Engine, rig: Rig) -> None:
    """Constrained sampling is left out: there the engine's distribution is the model's under a mask."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(vllm.model, dtype=torch.float32)
    worst, tokens = 0.0, 0
    for call in (call for name in FREE for call in rig.record(name)["calls"]):
        prompt, sampled = call["prompt_token_ids"], call["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        mine = torch.log_softmax(logits.double(), -1)[torch.arange(len(sampled)), torch.tensor(sampled)]
        worst = max(worst, float((mine - torch.tensor(call["logprobs"]).double()).abs().max()))
        tokens += len(sampled)
    assert tokens > 200
    assert worst < 1e-3


def test_an_unmodified_client_talks_for_several_turns(proxy: ProxyProcess, rig: Rig) -> None:
    """The plain OpenAI client, which knows a base URL and a key; then reward, lease, and the samples it became."""
    from openai import OpenAI

    opened = rig.post("/episodes", {"task": "several turns", "model": "tiny"}).json()
    client = OpenAI(base_url=opened["base_url"], api_key=opened["api_key"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "guess a number"}]
    for turn in range(3):
        stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, seed=turn, stream=True)  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "higher"}]
    client.close()
    assert rig.reward(opened["episode"], 0.25).is_success
    record = rig.record(opened["episode"])
    leased = rig.post("/batches/lease", {"group_size": 1, "model": "tiny"})
    batch = decode_batch(leased.content)
    [episode] = [item for group in batch.groups for item in group.episodes]
    assert (episode.episode, episode.reward, episode.task) == (opened["episode"], 0.25, "several turns")
    spans = [(call, sample.token_ids[a:b]) for sample in episode.samples for call, a, b in sample.spans]
    assert sorted(spans) == sorted((call["call"], tuple(call["token_ids"])) for call in record["calls"])
    assert len(record["calls"]) == 3
    assert rig.post(f"/batches/{batch.batch}/ack", {"policy_version": 1}).is_success
    assert rig.record(opened["episode"])["state"] == "trained"
