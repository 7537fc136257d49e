"""From what the engine said to the record that is kept."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ajet_proxy.core.trajectory.call import Captured, Change, Origin, prompt_hash, to_packed, versions_of
from ajet_proxy.core.trajectory.timeline import pack
from ajet_sdk.sample import Call

ORIGIN = Origin(
    calls=("call-0", "call-1"), episode="ep", model="policy", agent="solver", started_at=7.5, policy_version=3,
    identified_by="path", altered=("logprobs",), continuity="exact",
)  # fmt: skip


def captured(ids: tuple[int, ...], index: int = 1) -> Captured:
    return Captured(index, "engine-name", (1, 2), ids, tuple(-0.5 for _ in ids), "stop")


def test_a_call_is_what_the_engine_said_and_what_the_proxy_knew() -> None:
    call = Call(
        call="call-1", episode="ep", model="policy", agent="solver", started_at=7.5, prompt_token_ids=(1, 2),
        token_ids=(3, 4), logprobs=(-0.5, -0.5), finish_reason="stop", policy_versions=((3, 2),), identified_by="path",
        altered=("logprobs",), continuity="exact",
    )  # fmt: skip
    assert to_packed(captured((3, 4)), ORIGIN) == pack(call)
    retold = dataclasses.replace(call, same_text=("c", 1))
    assert to_packed(captured((3, 4)), ORIGIN, same_text=("c", 1)) == pack(retold)


def test_tokens_belong_to_the_weights_that_sampled_them() -> None:
    changes = (Change(4, (9, 2)), Change(5, (9, 2)), Change(6, (9, 3)))
    assert to_packed(captured((7, 8, 9, 10, 11)), ORIGIN, changes).turn.policy_versions == ((3, 2), (5, 1), (6, 2))
    assert to_packed(captured((7, 8)), ORIGIN, (Change(4, (0, 0)),)).turn.policy_versions == ((4, 2),)
    assert to_packed(captured((7, 8)), ORIGIN, (Change(4, (0, 2)),)).turn.policy_versions == ((3, 2),)


CHANGED = (Change(4, (2, 2)),)


@pytest.mark.parametrize(
    ("labels", "changes", "expected"),
    [
        ((), (), (((3, 5),), False)),
        ((), CHANGED, (((3, 2), (4, 3)), True)),
        ((("3", 1), ("4", 4)), CHANGED, (((3, 1), (4, 4)), False)),
        ((("4", 5),), (), (((4, 5),), False)),
        ((("3", 5),), CHANGED, (((3, 5),), False)),
        ((("default", 5),), (), (((3, 5),), False)),
        ((("default", 5),), CHANGED, (((3, 2), (4, 3)), True)),
        ((("a", 2), ("b", 3)), (), (((3, 5),), True)),
        ((("3", 2), ("b", 3)), (), (((3, 5),), True)),
        ((("2", 5),), (), (((3, 5),), True)),
        ((("5", 5),), (), (((3, 5),), True)),
        ((("4", 2), ("3", 3)), CHANGED, (((3, 2), (4, 3)), True)),
        ((("³", 5),), (), (((3, 5),), False)),
        ((("9" * 5000, 5),), (), (((3, 5),), False)),
    ],
)  # fmt: skip
def test_whose_word_counts_about_the_weights(labels: object, changes: tuple[Change, ...], expected: object) -> None:
    told = replace(captured((1, 2, 3, 4, 5)), labels=labels)  # type: ignore[arg-type]
    assert versions_of(told, 3, changes) == expected
    turn = to_packed(told, ORIGIN, changes).turn
    assert (turn.policy_versions, turn.version_uncertain) == expected


@given(
    st.lists(st.tuples(st.sampled_from(["1", "2", "3", "x"]), st.integers(1, 3)), max_size=4),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3), st.integers(0, 3),
)  # fmt: skip
def test_each_token_has_one_version_whatever_is_told(
    labels: list[tuple[str, int]], changes: list[tuple[int, int]], before: int
) -> None:
    sampled = sum(count for _, count in labels) or 3
    places = sorted(place for _, place in changes)  # where a stream tells no ids, its events may be more than those
    read = tuple(Change(version, (0, place)) for (version, _), place in zip(changes, places, strict=True))
    spans, uncertain = versions_of(replace(captured(tuple(range(sampled))), labels=tuple(labels)), before, read)
    assert sum(count for _, count in spans) == sampled and all(count > 0 for _, count in spans)
    if len({before, *(version for version, _ in changes)}) > 1 and not uncertain:
        assert [str(version) for version, _ in spans] == [label for label, _ in labels]


def test_a_call_of_no_tokens_is_certain() -> None:
    assert versions_of(captured(()), 3, (Change(4, (0, 0)),)) == ((), False)


def test_a_call_says_that_its_logprobs_came_later() -> None:
    scored = Captured(0, "m", (1,), (2,), (-0.5,), "stop", scored=True)
    assert to_packed(scored, ORIGIN).turn.altered == ("logprobs", "scored_logprobs")


def test_a_request_without_a_model_takes_the_engines_name() -> None:
    nameless = Origin(("c",), "ep", "", "", 0.0, 0, "lineage", ())
    assert to_packed(captured((3,), index=0), nameless).turn.model == "engine-name"


def test_equal_prompts_make_equal_tasks() -> None:
    assert prompt_hash((1, 2, 3)) == prompt_hash([1, 2, 3])
    hashes = {prompt_hash(ids) for ids in ((), (0,), (0, 0), (1, 2, 3), (1, 2, 2**31), (258,), (2, 1))}
    assert len(hashes) == 7
    assert prompt_hash((1, 2, 3)) == "prompt-e2e2033ae7e19d680599d4eb", "a task's name outlives a release"
