"""The wire: golden bytes of each version, every truncation, and nothing that is not a frame gets through."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk import frame
from ajet_sdk.errors import TooLarge
from ajet_sdk.sample import Batch, BatchEpisode, Group, Sample
from tests.kit.strategies import samplings

GOLDEN = Path(__file__).parent / "golden"


def sample(name: str = "s1", **change: Any) -> Sample:
    fields: dict[str, Any] = {
        "sample": name, "episode": "e1", "task": "t", "model": "m", "agent": "solver",
        "token_ids": (1, 151643, 3, 4, 5, 6), "loss_mask": (0, 0, 1, 1, 0, 1),
        "logprobs": (0.0, 0.0, -0.5, -0.25, 0.0, -1.5), "policy_versions": ((3, 2), (4, 1)),
        "calls": ("c1", "c2"), "spans": (("c1", 2, 4), ("c2", 5, 6)), "reward": 0.5,
        "sampling": (({"logprobs": "raw", "temperature": 0.7, "top_p": None}, 2), (None, 1)),
        "finish_reasons": ("stop", "length"),
    }
    return Sample(**fields | change)


def batch() -> Batch:
    tree = sample(
        "s2", token_ids=(1, 2), loss_mask=(1, 1), logprobs=(-1.0, -2.0), policy_versions=((4, 2),), calls=("c3",),
        spans=(("c3", 0, 2),), reward=None, broken_by="retokenized", repaired_tokens=1, parents=(-1, 0),
        sampling=(), finish_reasons=(),
    )
    reward = {"id": "rew-1", "value": 0.5, "final": True, "note": "né"}
    episode = BatchEpisode("e1", "t", "m", 0.5, (reward,), (sample(), tree))
    return Batch("batch-1", 1790000000.25, 4, (Group("t", (episode,)), Group("empty", ())))


def body(change: Any = None) -> Any:
    """The decoded frame of `batch`, changed by a function."""
    out = msgpack.unpackb(frame.encode_batch(batch()), raw=False)
    if change is not None:
        change(out)
    return out


def first(out: Any) -> Any:
    return out["groups"][0]["episodes"][0]["samples"][0]


def test_tokens_of_uncertain_weights_are_said_where_there_are_any() -> None:
    uncertain = replace(sample(), uncertain_tokens=2)
    one = BatchEpisode("e1", "t", "m", 0.5, (), (uncertain, sample()))
    sent = Batch("b", 0.0, 4, (Group("t", (one,)),))
    assert frame.decode_batch(frame.encode_batch(sent)) == sent
    first, second = msgpack.unpackb(frame.encode_batch(sent), raw=False)["groups"][0]["episodes"][0]["samples"]
    assert first["uncertain_tokens"] == 2 and "uncertain_tokens" not in second


def test_the_order_of_calls_is_said_where_it_is_known() -> None:
    one = BatchEpisode("e1", "t", "m", 0.5, (), (sample(turns=(0, 3)), sample()))
    sent = Batch("b", 0.0, 4, (Group("t", (one,)),))
    assert frame.decode_batch(frame.encode_batch(sent)) == sent
    first, second = msgpack.unpackb(frame.encode_batch(sent), raw=False)["groups"][0]["episodes"][0]["samples"]
    assert first["turns"] == [0, 3] and "turns" not in second


def test_golden_frame_of_version_2() -> None:
    golden = (GOLDEN / "batch.v2.msgpack").read_bytes()
    assert frame.encode_batch(batch()) == golden
    assert frame.decode_batch(golden) == batch()


def test_golden_frame_of_version_1() -> None:
    """It tells neither how tokens were sampled nor why calls ended."""
    (group, empty), (episode,) = batch().groups, batch().groups[0].episodes
    untold = tuple(replace(one, sampling=(), finish_reasons=()) for one in episode.samples)
    older = replace(batch(), groups=(replace(group, episodes=(replace(episode, samples=untold),)), empty))
    assert frame.decode_batch((GOLDEN / "batch.v1.msgpack").read_bytes()) == older


def test_equal_samplings_are_equal_bytes() -> None:
    def sent(*names: str) -> bytes:
        bias = {"logit_bias": dict.fromkeys(names, 1.5), **dict.fromkeys(names)}
        one = BatchEpisode("e1", "t", "m", 0.5, (), (sample(sampling=((bias, 3),)),))
        return frame.encode_batch(Batch("b", 0.0, 4, (Group("t", (one,)),)))

    assert sent("a", "b") == sent("b", "a")


def test_every_truncation_is_an_error_that_says_so() -> None:
    data = frame.encode_batch(batch())
    for size in range(len(data)):
        with pytest.raises(frame.FrameError, match=f"^frame of {size} bytes is truncated: .*'groups' missing"):
            frame.decode_batch(data[:size])
    with pytest.raises(frame.FrameError, match=r"truncated: 'lease_until', 'policy_version', 'groups' missing"):
        frame.decode_batch(data[: data.index(b"lease_until")])


def test_this_version_and_the_one_before_it_are_read() -> None:
    for version in (frame.VERSION, frame.VERSION - 1):
        assert frame.decode_batch(msgpack.packb({**body(), "version": version})) == batch()


def test_a_byte_too_many_is_an_error() -> None:
    with pytest.raises(frame.FrameError):
        frame.decode_batch(frame.encode_batch(batch()) + b"\x00")


def test_an_oversized_frame_is_not_even_parsed() -> None:
    data = frame.encode_batch(batch())
    with pytest.raises(TooLarge, match="limit of 10"):
        frame.decode_batch(data, max_bytes=10)


def test_unknown_fields_are_ignored_at_every_level() -> None:
    def grow(value: Any) -> Any:
        """But not how tokens were sampled, whose names the frame does not know."""
        if isinstance(value, dict):
            grown = {name: item if name == "sampling" else grow(item) for name, item in value.items()}
            return {**grown, "later": [1, {2: 3}]}
        return [grow(item) for item in value] if isinstance(value, list) else value

    decoded = frame.decode_batch(msgpack.packb(grow(body())))
    assert decoded.groups[0].episodes[0].samples == batch().groups[0].episodes[0].samples


@pytest.mark.parametrize("version", [0, 3, -1, 99])
def test_another_wire_version_is_named(version: int) -> None:
    with pytest.raises(frame.FrameError, match=f"version {version}") as caught:
        frame.decode_batch(msgpack.packb({**body(), "version": version}))
    assert caught.value.code == "wire_version"


def test_nothing_is_ever_unpickled() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os._exit, (3,)

    trap = pickle.dumps(Trap())
    ext = msgpack.ExtType(42, trap)
    for data in (trap, msgpack.packb(trap), msgpack.packb(ext), msgpack.packb({**body(), "groups": ext})):
        with pytest.raises(frame.FrameError):
            frame.decode_batch(data)
    assert "import pickle" not in Path(frame.__file__).read_text()


@pytest.mark.parametrize("path", [("version",), ("batch",), ("lease_until",), ("policy_version",), ("groups",)])
def test_a_missing_field_is_named(path: tuple[str, ...]) -> None:
    with pytest.raises(frame.FrameError, match=path[-1]) as caught:
        frame.decode_batch(msgpack.packb(body(lambda out: out.pop(path[-1]))))
    assert caught.value.param == path[-1]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("token_ids", b"\x01\x00\x00", "whole number"),
        ("token_ids", [1, 2], "type list"),
        ("token_ids", b"\x01\x00\x00\x00", "add up to 1"),
        ("loss_mask", [2, 2, 1], "add up to 6"),
        ("loss_mask", [2, -1, 5], "non-negative"),
        ("loss_mask", [2, 4.0], "non-negative"),
        ("loss_mask", [2, 10**12], "add up to 6"),
        ("logprobs", b"\x00" * 4, "differ in length"),
        ("policy_versions", [[3, 2]], "add up to 3"),
        ("policy_versions", [[3, 3, 1]], "policy_versions"),
        ("policy_versions", [7], "policy_versions"),
        ("policy_versions", [["3", 3]], "policy_versions"),
        ("calls", [1], "holds a int"),
        ("calls", "c1", "type str"),
        ("spans", [["c1", 2]], "a span must be"),
        ("spans", [["c1", 2, 7]], "a span must be"),
        ("spans", [["c1", 4, 2]], "a span must be"),
        ("spans", [["c1", "2", 4]], "a span must be"),
        ("reward", "1", "finite"),
        ("reward", float("nan"), "finite"),
        ("reward", True, "finite"),
        ("broken_by", 7, "broken_by"),
        ("repaired_tokens", "7", "repaired_tokens"),
        ("uncertain_tokens", "7", "uncertain_tokens"),
        ("parents", b"\x00" * 4, "parents"),
        ("parents", b"\xff\xff\xff\xff" + b"\x05\x00\x00\x00" * 5, "earlier token"),
        ("parents", [0], "parents"),
        ("sampling", [], "sampling must be runs .* add up to 3"),
        ("sampling", [[{}, 2], [None, 0]], "sampling must be runs"),
        ("sampling", [[{}, True], [None, 2]], "sampling must be runs"),
        ("sampling", [[{}, 2], [None, 1, 1]], "sampling must be runs"),
        ("sampling", [[7, 3]], "sampling must be an object"),
        ("sampling", [[{3: 3}, 3]], "sampling must be an object"),
        ("sampling", [[{"top_p": float("nan")}, 3]], "sampling must be a finite number"),
        ("sampling", [7], "'sampling' holds a int"),
        ("sampling", {}, "'sampling' has type dict"),
        ("finish_reasons", ["stop"], "1 finish_reasons for 2 calls"),
        ("finish_reasons", ["stop", 1], "'finish_reasons' holds a int"),
        ("turns", [1], "1 turns for 2 calls"),
        ("turns", [0, "1"], "'turns' holds a str"),
        ("turns", [0, True], "turns must be integers from 0"),
        ("turns", [0, -1], "turns must be integers from 0"),
        ("sample", 7, "type int"),
        ("agent", None, "type NoneType"),
    ],
)
def test_a_sample_that_is_not_what_it_says_is_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(frame.FrameError, match=says) as caught:
        frame.decode_batch(msgpack.packb(body(lambda out: first(out).update({name: value}))))
    assert name in ("sample",) or "s1" in caught.value.message


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out.update(groups=[7]),
        lambda out: out.update(lease_until=float("inf")),
        lambda out: out["groups"][0].update(episodes=[7]),
        lambda out: out["groups"][0]["episodes"][0].update(samples=[7]),
        lambda out: out["groups"][0]["episodes"][0].update(rewards=[7]),
        lambda out: out["groups"][0]["episodes"][0].update(reward=float("nan")),
        lambda out: out["groups"][0]["episodes"][0].update(reward=None),
        lambda out: out["groups"][0]["episodes"][0].update(model=True),
    ],
)
def test_so_is_anything_around_it(change: Any) -> None:
    with pytest.raises(frame.FrameError):
        frame.decode_batch(msgpack.packb(body(change)))


@given(st.binary(max_size=60))
def test_random_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(frame.FrameError):
        frame.decode_batch(data)


@given(st.data())
def test_a_damaged_frame_is_refused_or_read_and_never_anything_else(data: st.DataObject) -> None:
    whole = bytearray(frame.encode_batch(batch()))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    with suppress(frame.FrameError):
        frame.decode_batch(bytes(whole))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    mask = tuple(draw(st.lists(st.integers(0, 1), max_size=30)))
    size, sampled = len(mask), sum(mask)
    ids = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=size, max_size=size))
    logprobs = draw(st.lists(st.floats(-100, 0, width=32), min_size=size, max_size=size))
    return sample(
        token_ids=tuple(ids), loss_mask=mask, logprobs=tuple(logprobs), spans=(),
        policy_versions=((1, sampled),) if sampled else (),
        sampling=((draw(samplings), sampled),) if sampled else (),
        finish_reasons=draw(st.sampled_from([(), ("stop", "length")])), turns=draw(st.sampled_from([(), (0, 7)])),
    )


@given(st.lists(samples(), max_size=3))
def test_what_is_encoded_is_decoded(drawn: list[Sample]) -> None:
    episode = BatchEpisode("e1", "t", "m", 1.0, (), tuple(drawn))
    there = Batch("b", 1.0, 1, (Group("t", (episode,)),))
    assert frame.decode_batch(frame.encode_batch(there)) == there


@given(st.lists(st.integers(0, 1), max_size=50))
def test_masks_are_runs(mask: list[int]) -> None:
    runs = frame.pack_mask(mask)
    assert frame.unpack_mask(runs, len(mask)) == tuple(mask)
    assert 0 not in runs[1:]


def test_the_bytes_of_tokens_and_logprobs_are_little_endian() -> None:
    assert frame.pack("i", [1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert frame.pack("f", [1.0]) == b"\0\0\x80\x3f"


def test_a_machine_of_the_other_byte_order_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    there = frame.pack("i", [1, 258])
    monkeypatch.setattr("sys.byteorder", "big")
    assert frame.pack("i", [1, 258]) == b"".join(there[at : at + 4][::-1] for at in (0, 4))
    assert frame.unpack("i", frame.pack("i", [1, 258]), "x") == (1, 258)
