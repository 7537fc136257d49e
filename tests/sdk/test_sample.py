"""Calls and samples as JSON lines: whole records only, and what is written is read back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.errors import BadRequest
from ajet_sdk.sample import Call, Sample, canonical, spans_of

LINE: dict[str, Any] = {
    "call": "c1", "episode": "e1", "model": "m", "agent": "a", "started_at": 1.5,
    "prompt_token_ids": [1, 2, 3], "token_ids": [4, 5], "logprobs": [-0.5, -1], "finish_reason": "stop",
    "policy_version": 7,
}
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@st.composite
def call_lines(draw: st.DrawFn) -> dict[str, Any]:
    token_ids = draw(TOKENS)
    size = len(token_ids)
    logprobs = draw(st.lists(st.floats(-50, 0), min_size=size, max_size=size))
    cut = draw(st.integers(0, size))
    spans = [[version, count] for version, count in ((3, cut), (4, size - cut)) if count]
    line = {
        **LINE,
        "started_at": draw(st.floats(0, 2e9)),
        "prompt_token_ids": draw(TOKENS),
        "token_ids": token_ids,
        "logprobs": logprobs,
        "policy_version": draw(st.sampled_from([7, spans])),
    }
    return line | draw(st.sampled_from([{}, {"altered": ["seed"], "identified_by": "key"},
                                        {"sampling": {"top_p": None, "logit_bias": {"7": 1.5}}}]))


@given(call_lines())
def test_a_call_written_is_read_back(line: dict[str, Any]) -> None:
    call = Call.from_json(line)
    assert Call.from_json(json.loads(json.dumps(call.to_json()))) == call
    assert sum(count for _, count in call.policy_versions) == len(call.token_ids)


def test_unknown_fields_are_ignored() -> None:
    assert Call.from_json(LINE | {"colour": "blue"}) == Call.from_json(LINE)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"call": None}, "call"),
        ({"episode": 3}, "episode"),
        ({"started_at": None}, "started_at"),
        ({"started_at": True}, "started_at"),
        ({"started_at": float("inf")}, "started_at"),
        ({"started_at": 10**400}, "started_at"),
        ({"prompt_token_ids": None}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.0]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": [2**31]}, "prompt_token_ids"),
        ({"token_ids": "ab"}, "token_ids"),
        ({"token_ids": [4]}, "logprobs"),
        ({"logprobs": [-0.5]}, "logprobs"),
        ({"logprobs": [-0.5, float("nan")]}, "logprobs"),
        ({"logprobs": [-0.5, None]}, "logprobs"),
        ({"logprobs": [-0.5, 10**400]}, "logprobs"),
        ({"logprobs": [-0.5, 0.5]}, "logprobs"),
        ({"logprobs": [1e300, -0.5]}, "logprobs"),
        ({"logprobs": [-0.5, -3.5e38]}, "logprobs"),
        ({"logprobs": -0.5}, "logprobs"),
        ({"policy_version": "7"}, "policy_version"),
        ({"policy_version": 2**31}, "policy_version"),
        ({"policy_version": [[7, 1]]}, "policy_version"),
        ({"policy_version": [[7, 2], [8, 0]]}, "policy_version"),
        ({"policy_version": [[7, 1, 1]]}, "policy_version"),
        ({"policy_version": [7]}, "policy_version"),
        ({"identified_by": 3}, "identified_by"),
        ({"altered": "seed"}, "altered"),
        ({"altered": [1]}, "altered"),
        ({"sampling": "greedy"}, "sampling"),
        ({"sampling": []}, "sampling"),
        ({"sampling": {"seed": 2**64}}, "sampling"),
    ],
)
def test_a_call_that_is_not_whole_is_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Call.from_json(LINE | change)
    assert caught.value.param == param


def test_the_logprob_that_cannot_be_is_named() -> None:
    with pytest.raises(BadRequest, match=r"at most 0, and finite in 32 bits, found 0\.5$"):
        Call.from_json(LINE | {"logprobs": [-0.5, 0.5]})
    for rounded in (0.0, -0.0, 1e-7, -9999.0):
        assert Call.from_json(LINE | {"logprobs": [-0.5, rounded]}).logprobs == (-0.5, rounded)


@pytest.mark.parametrize("line", [None, [], "text", 3])
def test_a_call_is_an_object(line: Any) -> None:
    with pytest.raises(BadRequest, match="JSON object"):
        Call.from_json(line)


def test_equal_samplings_are_equal_texts() -> None:
    assert canonical({"b": {"2": 0.5, "1": 1}, "a": "é"}) == canonical({"a": "é", "b": {"1": 1, "2": 0.5}})
    assert canonical({"b": {"2": 0.5, "1": 1}, "a": "é"}) == '{"a":"é","b":{"1":1,"2":0.5}}'


def test_spans_of_nothing_are_none() -> None:
    assert spans_of(7, 0) == ()
    assert spans_of([], 0) == ()


def test_a_sample_has_one_length_and_leaves_out_what_it_lacks() -> None:
    fields = {"sample": "s", "episode": "e", "task": "t", "model": "m", "agent": "", "policy_versions": ((1, 1),)}
    sample = Sample(
        **fields, token_ids=(1, 2), loss_mask=(0, 1), logprobs=(0.0, -1.0), calls=("c",), spans=(("c", 1, 2),),
        finish_reasons=("stop",), turns=(2,),
    )
    line = sample.to_json()
    assert line["spans"] == [["c", 1, 2]]
    assert line["policy_versions"] == [[1, 1]]
    assert (line["finish_reasons"], line["turns"]) == (["stop"], [2])
    assert not {"broken_by", "repaired_tokens", "uncertain_tokens", "sampling"} & set(line)
    more = Sample(
        **fields, token_ids=(1,), loss_mask=(1,), logprobs=(0.0,), calls=(), spans=(), broken_by="parallel",
        repaired_tokens=2, uncertain_tokens=1, sampling=(({"top_p": 0.5}, 1), (None, 2)),
        finish_reasons=(), turns=(),
    ).to_json()
    assert (more["sampling"], more["uncertain_tokens"]) == ([[{"top_p": 0.5}, 1], [None, 2]], 1)
    assert (more["broken_by"], more["repaired_tokens"]) == ("parallel", 2)
    with pytest.raises(BadRequest, match="differ in length"):
        replace(sample, loss_mask=(0,))


def test_a_call_says_which_other_call_its_prompt_repeats() -> None:
    assert "same_text" not in Call.from_json(LINE).to_json()
    call = Call.from_json(LINE | {"same_text": ["a", 3]})
    assert call.same_text == ("a", 3) and call.to_json()["same_text"] == ["a", 3]
    assert Call.from_json(call.to_json()) == call
    for bad in ("a", ["a"], ["a", 0], ["a", True], [1, 1], ["a", 1.0], {"a": 1}):
        with pytest.raises(BadRequest, match="same_text"):
            Call.from_json(LINE | {"same_text": bad})


def test_a_call_says_whether_its_versions_are_uncertain() -> None:
    assert "version_uncertain" not in Call.from_json(LINE).to_json()
    call = Call.from_json(LINE | {"version_uncertain": True})
    assert call.version_uncertain and call.to_json()["version_uncertain"] is True
    assert Call.from_json(call.to_json()) == call
