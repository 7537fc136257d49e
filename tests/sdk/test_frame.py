"""The wire: the bytes that were recorded, every truncation, and nothing that is not a frame gets through."""

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

RECORDED = Path(__file__).parent.parent / "formats/frame.msgpack"


def sample(name: str = "s1", **change: Any) -> Sample:
    fields: dict[str, Any] = {
        "sample": name, "episode": "e1", "task": "t", "model": "m", "agent": "solver",
        "token_ids": (1, 151643, 3, 4, 5, 6), "loss_mask": (0, 0, 1, 1, 0, 1),
        "logprobs": (0.0, 0.0, -0.5, -0.25, 0.0, -1.5), "policy_versions": ((3, 2), (4, 1)),
        "calls": ("c1", "c2"), "spans": (("c1", 2, 4), ("c2", 5, 6)), "reward": 0.5,
        "sampling": (({"logprobs": "raw", "temperature": 0.7, "top_p": None}, 2), (None, 1)),
        "finish_reasons": ("stop", "length"), "turns": (0, 3),
    }
    return Sample(**fields | change)


def batch() -> Batch:
    other = sample(
        "s2", token_ids=(1, 2), loss_mask=(1, 1), logprobs=(-1.0, -2.0), policy_versions=((4, 2),), calls=("c3",),
        spans=(("c3", 0, 2),), reward=None, broken_by="retokenized", repaired_tokens=1, sampling=(),
        finish_reasons=("stop",), turns=(1,),
    )
    reward = {"id": "rew-1", "value": 0.5, "final": True, "note": "né"}
    episode = BatchEpisode("e1", "t", "m", 0.5, (reward,), (sample(), other))
    return Batch("batch-1", 1790000000.25, 4, (Group("t", (episode,)), Group("empty", ())))


def body(change: Any = None) -> Any:
    """The decoded frame of `batch`, changed by a function."""
    out = msgpack.unpackb(frame.encode_batch(batch()), raw=False)
    if change is not None:
        change(out)
    return out


def first(out: Any) -> Any:
    return out["groups"][0]["episodes"][0]["samples"][0]


def test_no_text_of_one_episode_keeps_a_batch_from_its_trainer() -> None:
    odd = BatchEpisode("e2", "t", "m", 0.5, (), (sample("s3", agent="half \ud800", finish_reasons=("\udfff", "stop")),))
    found = frame.decode_batch(frame.encode_batch(replace(batch(), groups=(*batch().groups, Group("u", (odd,))))))
    assert found.groups[:-1] == batch().groups
    assert found.groups[-1].episodes[0].samples[0].agent == "half ?"


def test_the_frame_that_was_recorded() -> None:
    """By `tests.formats.record`."""
    recorded = RECORDED.read_bytes()
    assert frame.encode_batch(batch()) == recorded
    assert frame.decode_batch(recorded) == batch()


def test_equal_samplings_are_equal_bytes() -> None:
    def sent(*names: str) -> bytes:
        bias = {"logit_bias": dict.fromkeys(names, 1.5), **dict.fromkeys(names)}
        one = BatchEpisode("e1", "t", "m", 0.5, (), (sample(sampling=((bias, 3),)),))
        return frame.encode_batch(Batch("b", 0.0, 4, (Group("t", (one,)),)))

    assert sent("a", "b") == sent("b", "a")


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


def test_a_group_tells_its_lane_unless_it_is_the_default_one() -> None:
    lanes = ["math", "default", ""]
    told = Batch("b", 0.0, 0, tuple(Group("t", (), lane=lane) for lane in lanes))
    packed = frame.encode_batch(told)
    assert [group.get("lane") for group in msgpack.unpackb(packed)["groups"]] == ["math", None, ""]
    assert frame.decode_batch(packed) == told
    wrong = body(lambda out: out["groups"][1].update(lane=7))
    with pytest.raises(frame.FrameError, match="'lane' has type int"):
        frame.decode_batch(msgpack.packb(wrong))


@pytest.mark.parametrize("version", [0, 2, -1, 99])
def test_another_wire_version_is_named(version: int) -> None:
    with pytest.raises(frame.FrameError, match=f"version {version}; this reader knows 1$") as caught:
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
        ("end", 7, "end 7 is none of the tree's 7 nodes"),
        ("end", -2, "end -2 is none"),
        ("end", "2", "'end' has type str"),
        ("end", True, "'end' has type bool"),
        ("end", 0, "loss_mask: run lengths must .* add up to 1"),
        ("end", -1, "add up to 0"),
        ("loss_mask", [2, 2, 1], "add up to 6"),
        ("loss_mask", [2, -1, 5], "non-negative"),
        ("loss_mask", [2, 4.0], "non-negative"),
        ("loss_mask", [2, 10**12], "add up to 6"),
        ("logprobs", b"\x00" * 4, "1 logprobs for 3 sampled tokens"),
        ("logprobs", b"\x00" * 3, "whole number"),
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
        ("sampling", [], "sampling must be runs .* add up to 3"),
        ("sampling", [[{}, 2], [None, 0]], "sampling must be runs"),
        ("sampling", [[{}, True], [None, 2]], "sampling must be runs"),
        ("sampling", [[{}, 2], [None, 1, 1]], "sampling must be runs"),
        ("sampling", [[7, 3]], "sampling must be an object"),
        ("sampling", [[{3: 3}, 3]], "sampling must be an object"),
        ("sampling", [[{"top_p": float("nan")}, 3]], "sampling must be a finite number"),
        ("sampling", [7], "'sampling' holds a int"),
        ("sampling", {}, "'sampling' has type dict"),
        ("finish_reasons", [], "0 finish_reasons for 2 calls"),
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
    ("tree", "says"),
    [
        ({"parents": [[6, 0], [1, 0]]}, "group 0: tree: run 0 has 6 nodes from node 0 on, the first a child of 0"),
        ({"parents": [[6, -1], [1, 6]]}, "group 0: tree: run 1 .* a child of 6"),
        ({"parents": [[6, -1]]}, "group 0: tree: its runs have 6 nodes, and there are 7 tokens"),
        ({"parents": [[6, -1], [1]]}, "parents must be runs of"),
        ({"parents": [[6, -1], [True, 0]]}, "parents must be runs of"),
        ({"parents": [7]}, "'parents' holds a int"),
        ({"token_ids": b"\x01\x00\x00"}, "group 0: tree: token_ids: 3 bytes is no whole number"),
        ({"token_ids": [1]}, "'token_ids' has type list"),
        ({"token_ids": frame.pack("i", (1, 2, 2, 3, 4, 5, 6))}, "node 2 repeats token 2 after node 0"),
        ({}, "lacks 'token_ids'"),
        (None, "'tree' has type NoneType"),
    ],
)
def test_a_tree_that_is_none_is_refused_with_its_place(tree: Any, says: str) -> None:
    def change(out: Any) -> None:
        known = out["groups"][0]["tree"]
        out["groups"][0]["tree"] = tree and known | tree

    assert [len(run) for run in body()["groups"][0]["tree"]["parents"]] == [2, 2]
    with pytest.raises(frame.FrameError, match=says):
        frame.decode_batch(msgpack.packb(body(change)))


def test_few_tokens_that_many_samples_share_are_not_laid_out_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    data = frame.encode_batch(batch())
    monkeypatch.setattr(frame, "MAX_TOKENS", 8)
    assert frame.decode_batch(data) == batch()
    monkeypatch.setattr(frame, "MAX_TOKENS", 7)
    with pytest.raises(frame.FrameError, match="sample s2: with its 2 tokens, all samples have more than 7"):
        frame.decode_batch(data)


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


def test_what_cannot_be_read_is_a_fault_of_its_episodes_alone() -> None:
    """Of those of a group whose tree is none, and of one whose sample is none. Without names nothing is read."""
    (told,) = batch().groups[0].episodes
    other = replace(told, episode="e2", samples=tuple(replace(one, episode="e2") for one in told.samples))
    sent = Batch("b", 0.0, 4, (Group("t", (told, other)), Group("u", (told,))))
    plain = msgpack.packb(body := msgpack.unpackb(frame.encode_batch(sent), raw=False))
    assert frame.decode_batch(plain, lenient=True) == sent

    first(body)["end"] = 99
    found = frame.decode_batch(msgpack.packb(body), lenient=True)
    empty = BatchEpisode("e1", "t", "m", 0.0, (), (), "sample s1: end 99 is none of the tree's 7 nodes, nor -1")
    assert found == replace(sent, groups=(Group("t", (empty, other)), sent.groups[1]))

    body["groups"][0]["tree"]["parents"] = [[6, 0], [1, 0]]
    (one, two), (three,) = (group.episodes for group in frame.decode_batch(msgpack.packb(body), lenient=True).groups)
    assert str(one.fault).startswith("group 0: tree: run 0") and one.fault == two.fault and three == told

    del body["groups"][0]["episodes"][0]["episode"]
    with pytest.raises(frame.FrameError, match="episode lacks 'episode'"):
        frame.decode_batch(msgpack.packb(body), lenient=True)


@given(st.binary(max_size=60))
def test_random_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(frame.FrameError):
        frame.decode_batch(data)


@st.composite
def samples(draw: st.DrawFn, known: list[Sample]) -> Sample:
    """One that begins as one of the `known` ones, or not; perhaps an empty one, or one of equal tokens."""
    before = draw(st.sampled_from(known)).token_ids if known else ()
    news = draw(st.lists(st.one_of(st.integers(0, 1), st.integers(-(2**31), 2**31 - 1)), max_size=6))
    ids = before[: draw(st.integers(0, len(before)))] + tuple(news)
    mask = tuple(draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids))))
    logprobs = tuple(draw(st.floats(-100, 0, width=32)) if bit else 0.0 for bit in mask)
    size = sum(mask)
    return sample(
        f"s{len(known)}", token_ids=ids, loss_mask=mask, logprobs=logprobs, spans=(),
        policy_versions=((1, size),) if size else (), sampling=((draw(samplings), size),) if size else (),
        turns=draw(st.sampled_from([(0, 1), (0, 7)])), uncertain_tokens=draw(st.integers(0, 1)),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Groups of episodes, whose samples share beginnings within an episode and beyond it."""
    groups = []
    for _ in range(draw(st.integers(0, 3))):
        known, episodes = list[Sample](), list[BatchEpisode]()
        for _ in range(draw(st.integers(0, 3))):
            own = draw(st.integers(0, 3))
            known += [draw(samples(known)) for _ in range(own)]
            episodes.append(BatchEpisode("e1", "t", "m", 1.0, (), tuple(known[len(known) - own :])))
        groups.append(Group("t", tuple(episodes)))
    return Batch("b", 1.0, 1, tuple(groups))


def exactly(there: Batch) -> str:
    """All that a batch says, with the signs of its zeros."""
    return repr(there)


@given(batches())
def test_what_is_encoded_is_decoded_bit_for_bit(there: Batch) -> None:
    sent = frame.encode_batch(there)
    assert exactly(frame.decode_batch(sent)) == exactly(there)
    assert frame.encode_batch(frame.decode_batch(sent)) == sent


@given(batches())
def test_each_beginning_that_samples_of_a_group_share_is_sent_once(there: Batch) -> None:
    for sent, group in zip(msgpack.unpackb(frame.encode_batch(there))["groups"], there.groups, strict=True):
        texts = [one.token_ids for episode in group.episodes for one in episode.samples]
        beginnings = {text[:length] for text in texts for length in range(1, len(text) + 1)}
        assert len(sent["tree"]["token_ids"]) == 4 * len(beginnings)
        logprobs = [one["logprobs"] for episode in sent["episodes"] for one in episode["samples"]]
        masks = [one.loss_mask for episode in group.episodes for one in episode.samples]
        assert [len(data) for data in logprobs] == [4 * sum(mask) for mask in masks]


@given(batches())
def test_each_truncation_of_any_frame_is_an_error(there: Batch) -> None:
    sent = frame.encode_batch(there)
    for size in range(0, len(sent), 1 + len(sent) // 50):
        with pytest.raises(frame.FrameError, match=f"^frame of {size} bytes is truncated: .*'groups' missing"):
            frame.decode_batch(sent[:size])


def test_what_a_truncated_frame_lacks_is_named() -> None:
    data = frame.encode_batch(batch())
    with pytest.raises(frame.FrameError, match=r"truncated: 'lease_until', 'policy_version', 'groups' missing"):
        frame.decode_batch(data[: data.index(b"lease_until")])


@given(st.data())
def test_a_damaged_frame_is_refused_or_read_and_never_anything_else(data: st.DataObject) -> None:
    whole = bytearray(frame.encode_batch(data.draw(batches())))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    with suppress(frame.FrameError):
        frame.decode_batch(bytes(whole), lenient=data.draw(st.booleans()))


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
