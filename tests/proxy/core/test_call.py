"""From what the engine said to the record that is kept."""

from __future__ import annotations

from ajet_proxy.core.call import Captured, Change, Origin, prompt_hash, to_call
from ajet_sdk.sample import Call

ORIGIN = Origin(
    calls=("call-0", "call-1"), episode="ep", model="policy", agent="solver", started_at=7.5, policy_version=3,
    identified_by="path", altered=("logprobs",),
)  # fmt: skip


def captured(ids: tuple[int, ...], index: int = 1) -> Captured:
    return Captured(index, "engine-name", (1, 2), ids, tuple(-0.5 for _ in ids), "stop")


def test_a_call_is_what_the_engine_said_and_what_the_proxy_knew() -> None:
    assert to_call(captured((3, 4)), ORIGIN) == Call(
        call="call-1", episode="ep", model="policy", agent="solver", started_at=7.5, prompt_token_ids=(1, 2),
        token_ids=(3, 4), logprobs=(-0.5, -0.5), finish_reason="stop", policy_versions=((3, 2),), identified_by="path",
        altered=("logprobs",),
    )  # fmt: skip


def test_tokens_belong_to_the_weights_that_sampled_them() -> None:
    changes = (Change(4, (9, 2)), Change(5, (9, 2)), Change(6, (9, 3)))
    assert to_call(captured((7, 8, 9, 10, 11)), ORIGIN, changes).policy_versions == ((3, 2), (5, 1), (6, 2))
    assert to_call(captured((7, 8)), ORIGIN, (Change(4, (0, 0)),)).policy_versions == ((4, 2),)
    assert to_call(captured((7, 8)), ORIGIN, (Change(4, (0, 2)),)).policy_versions == ((3, 2),)


def test_a_call_says_that_its_logprobs_came_later() -> None:
    scored = Captured(0, "m", (1,), (2,), (-0.5,), "stop", scored=True)
    assert to_call(scored, ORIGIN).altered == ("logprobs", "scored_logprobs")


def test_a_call_of_no_tokens_has_no_versions() -> None:
    assert to_call(captured((), index=0), ORIGIN).policy_versions == ()


def test_a_request_without_a_model_takes_the_engines_name() -> None:
    nameless = Origin(("c",), "ep", "", "", 0.0, 0, "lineage", ())
    assert to_call(captured((3,), index=0), nameless).model == "engine-name"


def test_equal_prompts_make_equal_tasks() -> None:
    assert prompt_hash((1, 2, 3)) == prompt_hash([1, 2, 3])
    hashes = {prompt_hash(ids) for ids in ((), (0,), (0, 0), (1, 2, 3), (1, 2, 2**31), (258,), (2, 1))}
    assert len(hashes) == 7
    assert prompt_hash((1, 2, 3)) == "prompt-e2e2033ae7e19d680599d4eb", "a task's name outlives a release"
