"""Hypothesis strategies: calls of one episode, and sequences of what can happen to a ledger.

`tangled_calls` draws tiny token texts over a small alphabet, so that every way for texts to coincide comes up often:
equal prompts, equal ends, prompts that stop within another's sampled tokens, calls that sampled nothing, and clocks
that contradict the texts. `conversations` draws what agents do: turns that go on from one another, with forks and
edits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from ajet_proxy.core.trajectory.timeline import Packed, pack
from ajet_proxy.io.storage.codec import EVENTS
from ajet_sdk.sample import Call

EPISODE = "ep"
EVENT_KINDS = tuple(EVENTS.values())


def nested(levels: int = 100_000) -> Any:
    """A list in a list, and so on."""
    made: Any = []
    for _ in range(levels):
        made = [made]
    return made


def make_call(
    name: str, prompt: Sequence[int], sampled: Sequence[int], *, at: float = 0.0, model: str = "m", agent: str = "",
    episode: str = EPISODE, version: int = 1, versions: Sequence[tuple[int, int]] | None = None,
    sampling: Mapping[str, Any] | None = None, finish: str = "stop",
) -> Call:
    """A call whose logprobs tell its tokens apart: -0.5, -1.5, …"""
    spans = tuple(versions) if versions is not None else (((version, len(sampled)),) if sampled else ())
    return Call(
        call=name, episode=episode, model=model, agent=agent, started_at=at, prompt_token_ids=tuple(prompt),
        token_ids=tuple(sampled), logprobs=tuple(-0.5 - index for index in range(len(sampled))), finish_reason=finish,
        policy_versions=spans, sampling=sampling,
    )


def packed_call(*made: Any, **how: Any) -> Packed:
    """`make_call`, as the ledger takes it."""
    return pack(make_call(*made, **how))


RAW, COLD = {"logprobs": "raw"}, {"logprobs": "raw", "temperature": 0.5, "top_p": None}
samplings: st.SearchStrategy[Mapping[str, Any] | None] = st.sampled_from([None, RAW, COLD])
tokens: st.SearchStrategy[list[int]] = st.lists(st.integers(0, 1), max_size=5)


@st.composite
def tangled_calls(draw: st.DrawFn, max_size: int = 9) -> list[Call]:
    """Calls of one episode, in any order, in which anything may be a prefix of anything."""
    count = draw(st.integers(1, max_size))
    calls: list[Call] = []
    for index in range(count):
        base: list[int] = []
        if len(calls) > 0 and draw(st.booleans()):
            before = draw(st.sampled_from(calls))
            whole = [*before.prompt_token_ids, *before.token_ids]
            base = whole[: draw(st.integers(0, len(whole)))]
        calls.append(
            make_call(
                f"c{index}", base + draw(tokens), draw(st.lists(st.integers(0, 1), max_size=3)),
                at=draw(st.sampled_from([0.0, 1.0, 2.0, 3.0])), model=draw(st.sampled_from(["m", "m", "m", "n"])),
                agent=draw(st.sampled_from(["", "", "", "b"])), version=draw(st.integers(0, 2)),
                sampling=draw(samplings), finish=draw(st.sampled_from(["stop", "length"])),
            )
        )
    shuffled: list[Call] = draw(st.permutations(calls))
    return shuffled


@st.composite
def conversations(draw: st.DrawFn, max_size: int = 12) -> list[Call]:
    """Calls of one agent in the order of their start; each prompt begins with an earlier call's text, mostly whole."""
    calls: list[Call] = []
    for index in range(draw(st.integers(1, max_size))):
        base = [7]
        if calls:
            before = calls[-1] if draw(st.integers(0, 3)) else draw(st.sampled_from(calls))
            base = [*before.prompt_token_ids, *before.token_ids]
            if not draw(st.integers(0, 4)):
                at = draw(st.integers(0, len(base) - 1))
                base[at] = 9
        news = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        sampled = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        calls.append(make_call(f"c{index:02d}", base + news, sampled, at=float(index), sampling=draw(samplings)))
    return calls
