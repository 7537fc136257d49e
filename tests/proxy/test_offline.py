"""`merge` over lines and `replay` over a journal."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.core.trajectory.samples import merge_calls
from ajet_proxy.io.storage import snapshot
from ajet_proxy.io.storage.codec import encode
from ajet_proxy.io.storage.compaction import compact
from ajet_proxy.io.storage.journal import FRAME, Journal, JournalDamaged, segments, snapshots
from ajet_proxy.offline import engine_text, merge_lines, replay_lines
from ajet_sdk.errors import AjetError, BadRequest
from ajet_sdk.frame import decode_batch, encode_batch
from ajet_sdk.sample import Call
from tests.kit import engine_tokens
from tests.kit.engine_tokens import IM_END
from tests.kit.histories import encoded, write_segments
from tests.kit.ledger_rig import SETTINGS, LedgerRig
from tests.kit.strategies import conversations, make_call, tangled_calls
from tests.kit.stub_process import stub_process


def lines(calls: list[Call]) -> list[str]:
    return [json.dumps(call.to_json()) for call in calls]


@given(st.one_of(tangled_calls(), conversations()), st.randoms(use_true_random=False))
def test_merging_lines_is_merging_calls_in_any_order(calls: list[Call], dice: random.Random) -> None:
    given_lines = lines(calls)
    dice.shuffle(given_lines)
    for policy in ("strict", "off"):
        expected = merge_calls(calls, "off" if policy == "off" else "strict")
        assert [json.loads(line) for line in merge_lines(given_lines, policy)] == [s.to_json() for s in expected]


def laid_out(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of a tree, by the parents of its nodes alone."""
    parents: list[int] = []
    for length, parent in tree["parents"]:
        parents += [parent, *range(len(parents), len(parents) + length - 1)]
    assert len(parents) == len(tree["token_ids"])
    samples = []
    for told in tree["samples"]:
        ids, node = list[int](), told["end"]
        while node >= 0:
            ids.insert(0, tree["token_ids"][node])
            node = parents[node]
        mask = [place & 1 for place, run in enumerate(told["loss_mask"]) for _ in range(run)]
        logprobs = iter(told["logprobs"])
        laid = {"token_ids": ids, "loss_mask": mask, "logprobs": [next(logprobs) if bit else 0.0 for bit in mask]}
        assert not list(logprobs)
        samples.append({name: value for name, value in told.items() if name != "end"} | laid)
    return samples


def check_tree(tree: dict[str, Any]) -> None:
    """Each distinct beginning is one node, and each sampled token's call is known."""
    samples = laid_out(tree)
    texts = [tuple(sample["token_ids"]) for sample in samples]
    assert len(tree["token_ids"]) == len({text[:end] for text in texts for end in range(1, len(text) + 1)})
    for sample in samples:
        spans = [place for _, start, end in sample["spans"] for place in range(start, end)]
        assert [place for place, bit in enumerate(sample["loss_mask"]) if bit] == spans
        assert [span[0] for span in sample["spans"]] == sample["calls"]
        assert sample["episode"] in tree["episodes"] and sample["task"] == tree["task"]


@given(st.lists(st.one_of(tangled_calls(), conversations()), max_size=3), st.randoms(use_true_random=False))
def test_trees_laid_out_are_the_strict_samples_bit_for_bit(made: list[list[Call]], dice: random.Random) -> None:
    """Of several episodes, which begin alike more often than not."""
    calls = [replace(call, episode=f"e{number}") for number, calls in enumerate(made) for call in calls]
    given_lines = lines(calls)
    dice.shuffle(given_lines)
    samples = list(map(json.loads, merge_lines(given_lines)))
    trees = list(map(json.loads, merge_lines(given_lines, by="episode")))
    assert repr([by_name(one) for tree in trees for one in laid_out(tree)]) == repr(list(map(by_name, samples)))
    groups = list(map(json.loads, merge_lines(given_lines, by="group")))
    assert [tree["task"] for tree in groups] == list(dict.fromkeys(sample["task"] for sample in samples))
    found = {one["sample"]: by_name(one) for tree in groups for one in laid_out(tree)}
    assert repr([found[sample["sample"]] for sample in samples]) == repr(list(map(by_name, samples)))
    for tree in (*trees, *groups):
        check_tree(tree)


def by_name(sample: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(sample.items())


def test_one_text_in_other_tokens_joins_by_what_calls_say_or_an_engine_knows() -> None:
    first = make_call("a", engine_tokens.encode("hi "), (*engine_tokens.encode("naïve"), IM_END), at=1.0)
    read = (*engine_tokens.encode("hi naïve<|im_end|>", merged=True), *engine_tokens.encode(" more"))
    second = make_call("b", read, (5,), at=2.0)
    said = replace(second, same_text=("a", len(read) - len(" more")))
    assert len(list(merge_lines(lines([first, second]), "repair"))) == 2
    (joined,) = merge_lines(lines([said, first]), "repair")
    assert json.loads(joined)["repaired_tokens"] == 1
    with stub_process() as url, engine_text(url, "key") as text:
        assert list(merge_lines(lines([first, second]), "repair", text=text)) == [joined]
        assert len(list(merge_lines(lines([first, second]), "strict", text=text))) == 2
    with engine_text(url, None) as gone, pytest.raises(AjetError, match="gives no text"):
        list(merge_lines(lines([first, second]), "repair", text=gone))


def test_each_episode_is_merged_by_itself_and_the_earliest_comes_first() -> None:
    calls = [
        make_call("c2", [1, 2, 3], [4], at=5.0, episode="late"), make_call("c1", [1], [2], at=1.0, episode="early"),
        make_call("c3", [9], [9], at=6.0, episode="early"),
    ]
    samples = [json.loads(line) for line in merge_lines(lines(calls))]
    assert [(sample["sample"], sample["calls"]) for sample in samples] == [
        ("early/0", ["c1"]), ("early/1", ["c3"]), ("late/0", ["c2"]),
    ]


def test_blank_lines_and_repeated_calls_count_nothing() -> None:
    (line,) = lines([make_call("a", [1], [2])])
    assert len(list(merge_lines(["\n", line, "  ", line]))) == 1
    assert list(merge_lines([])) == []


def test_incomplete_calls_of_a_record_have_nothing_to_merge() -> None:
    complete = make_call("a", [1], [2]).to_json()
    running = {"call": "b", "episode": complete["episode"], "complete": False, "in_flight": True}
    cut_off = {**make_call("c", [1, 2], [3]).to_json(), "complete": False, "reason": "truncated"}
    given_lines = [json.dumps(record) for record in ({**complete, "complete": True}, running, cut_off)]
    assert [json.loads(line)["calls"] for line in merge_lines(given_lines)] == [["a"]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{x", "line 2 is not JSON: Expecting property name enclosed in double quotes, at character 2"),
        ("[]", "line 2: a call must be a JSON object"),
        ("NaN", "line 2"),
        ('{"call": "b", "episode": "e"}', "line 2: token_ids"),
        (lines([make_call("a", [1], [3])])[0], "line 2: call a is in an earlier line with other contents"),
        (b'{"call": "\xff"}', "line 2 is not UTF-8 text"),
        (lines([replace(make_call("b", [1], [2]), logprobs=(1e300,))])[0], "line 2: logprobs .* found 1e[+]300"),
    ],
)
def test_what_is_no_call_is_named_by_its_line(bad: str | bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        list(merge_lines([*lines([make_call("a", [1], [2])]), bad]))


def test_zeros_of_both_signs_are_other_contents() -> None:
    calls = [replace(make_call("a", [1], [2]), logprobs=(zero,)) for zero in (0.0, -0.0)]
    with pytest.raises(BadRequest, match="line 2: call a is in an earlier line"):
        list(merge_lines(lines(calls)))


@pytest.mark.parametrize("policy", ["repair", "off"])
def test_what_cannot_be_done_is_refused_before_reading(policy: Any) -> None:
    with pytest.raises(BadRequest, match="--tree"):
        next(merge_lines(iter(["not read"]), policy, "group"))


# ---- replay


def journal_of(data: Path, rig: LedgerRig) -> Path:
    journal = Journal(data, lambda: None)
    assert list(journal.open()) == []
    journal.append([encode(event) for event in rig.events])
    assert journal.close() == 0
    return data


def delivered(rig: LedgerRig, batch: str | None) -> list[object]:
    """The batch as a trainer decodes it, as JSON."""
    assert batch is not None
    groups = decode_batch(encode_batch(views.batch(rig.state, batch))).groups
    return [sample.to_json() for group in groups for item in group.episodes for sample in item.samples]


def two_turns(rig: LedgerRig, task: str = "t") -> str:
    episode = rig.open(task=task)
    rig.call(episode, (1, 2), (3, 4))
    rig.call(episode, (1, 2, 3, 4, 5), (6,))
    rig.reward(episode, 0.1)
    return episode


def test_replay_gives_what_was_delivered_bit_for_bit_and_then_what_is_ready(tmp_path: Path) -> None:
    rig = LedgerRig(SETTINGS)
    rig.restart()
    two_turns(rig)
    first = rig.lease(group_size=1)
    expected = delivered(rig, first)
    assert first is not None
    rig.nack(first)
    rig.reward(next(iter(rig.state.episodes)), 0.7)
    expected += delivered(rig, rig.lease(group_size=1))
    rig.in_state("recorded")
    rig.in_state("discarded")
    waiting = two_turns(rig, "u")
    found = [json.loads(line) for line in replay_lines(journal_of(tmp_path, rig))]
    assert found[:2] == expected
    assert found[0]["reward"] != found[1]["reward"]
    assert [sample["episode"] for sample in found[2:]] == [waiting]
    assert [json.loads(line) for line in replay_lines(str(tmp_path))] == found


def test_replay_of_a_proxy_that_did_not_merge(tmp_path: Path) -> None:
    rig = LedgerRig(LedgerSettings(merge_policy="off", group_size=1))
    rig.restart()
    two_turns(rig)
    expected = delivered(rig, rig.lease())
    assert len(expected) == 2
    assert [json.loads(line) for line in replay_lines(journal_of(tmp_path, rig))] == expected


def test_trees_of_a_replay_laid_out_are_its_samples(tmp_path: Path) -> None:
    rig = LedgerRig(SETTINGS)
    rig.restart()
    first, second = two_turns(rig), two_turns(rig)
    assert rig.lease(group_size=2)
    ready = [two_turns(rig, task) for task in ("u", "v", "u")]
    journal_of(tmp_path, rig)
    samples = [json.loads(line) for line in replay_lines(tmp_path)]
    for by, expected in (
        ("episode", [[first], [second], [ready[0]], [ready[2]], [ready[1]]]),
        ("group", [[first, second], [ready[0], ready[2]], [ready[1]]]),
    ):
        trees = [json.loads(line) for line in replay_lines(tmp_path, by=by)]  # type: ignore[arg-type]
        assert [tree["episodes"] for tree in trees] == expected
        assert [by_name(one) for tree in trees for one in laid_out(tree)] == list(map(by_name, samples))
        assert all(len(tree["token_ids"]) == 6 for tree in trees)


def test_replay_reads_what_no_trainer_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode that is too large for a trainer is one that its user wants to look at."""
    rig = LedgerRig(SETTINGS)
    rig.restart()
    two_turns(rig)
    assert decode_batch.__kwdefaults__ is not None
    monkeypatch.setitem(decode_batch.__kwdefaults__, "max_bytes", 100)
    assert len(list(replay_lines(journal_of(tmp_path, rig)))) == 1


def test_replay_changes_nothing_and_reads_past_a_torn_tail(tmp_path: Path) -> None:
    rig = LedgerRig()
    two_turns(rig)
    journal_of(tmp_path, rig)
    (path,) = segments(tmp_path)
    with path.open("ab") as stream:
        stream.write(FRAME.pack(50, 0) + b"half")
    before = {item: item.read_bytes() for item in tmp_path.rglob("*") if item.is_file()}
    assert len(list(replay_lines(tmp_path))) == 1
    assert {item: item.read_bytes() for item in tmp_path.rglob("*") if item.is_file()} == before


def test_a_compaction_meanwhile_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = LedgerRig()
    two_turns(rig)
    found, read = encoded(rig.events), snapshot.load
    write_segments(tmp_path, found, [len(found) // 2])
    expected = list(replay_lines(tmp_path))
    compactions = [compact]

    def load(*given: Any) -> State:
        loaded = read(*given)
        while compactions:
            compactions.pop()(tmp_path)
        return loaded

    monkeypatch.setattr(snapshot, "load", load)
    assert list(replay_lines(tmp_path)) == expected
    assert snapshots(tmp_path)


def spoil_nothing(_: Path) -> None: ...


def spoil_record(data: Path) -> None:
    journal = Journal(data, lambda: None)
    assert list(journal.open()) == []
    journal.append([b"\xc1"])
    assert journal.close() == 0


@pytest.mark.parametrize(("spoil", "error"), [(spoil_nothing, BadRequest), (spoil_record, JournalDamaged)])
def test_what_cannot_be_replayed(tmp_path: Path, spoil: Callable[[Path], None], error: type[Exception]) -> None:
    spoil(tmp_path)
    with pytest.raises(error):
        list(replay_lines(tmp_path))
