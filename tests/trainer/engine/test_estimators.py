"""verl's advantage estimators through `AjetTrainer`: over episodes that stay whole, and over the same ones split."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

from ajet_sdk.sample import BatchEpisode, Group
from ajet_trainer.backends.verl import rows as queue
from ajet_trainer.backends.verl import settings, trainer
from ajet_trainer.backends.verl.estimators import BY_CALL, GROUPED
from ajet_trainer.batch import Row, to_row, to_rows
from ajet_trainer.config import Config
from ajet_trainer.turns import ByTurn, TurnReward, TurnSession, credit
from tests.trainer.engine.test_gradient import conversation, unmerged


class MemoryQueue:
    """TransferQueue's key-value calls over a dictionary."""

    def __init__(self, rows: dict[str, dict[str, Any]] | None = None) -> None:
        self.rows = {} if rows is None else rows

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any = None, tags: Any = None) -> Any:
        for index, key in enumerate(keys):
            for name in fields.keys() if fields is not None else ():
                self.rows.setdefault(key, {})[name] = fields[name][index]
        return KVBatchMeta(keys=keys, tags=tags or [{} for _ in keys], partition_id=partition_id)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        columns = {name: [self.rows[key][name] for key in keys] for name in select_fields if name in self.rows[keys[0]]}
        return TensorDict(
            {
                name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
                if isinstance(values[0], torch.Tensor) else NonTensorStack(*values)
                for name, values in columns.items()
            },
            batch_size=[len(keys)],
        )


def a_trainer(tiny: Path, *, device: str = "cpu", **options: Any) -> Any:
    """An `AjetTrainer` that has its configuration and nothing else; `options` are verl's, by the end of their names.
    Nothing is corrected unless they say so."""
    actor = {"mode": "loss_agg_mode", "loss": "policy_loss.loss_mode"}
    verl = {
        f"actor_rollout_ref.actor.{actor[name]}" if name in actor else f"algorithm.{name}": value
        for name, value in ({"rollout_correction.rollout_is": None} | options).items()
    }
    made = trainer.AjetTrainer.__new__(trainer.AjetTrainer)
    made.config = settings.compose(Config(model=str(tiny), sampling="exact", verl=verl), device, None)
    return made


def passed(
    made: Any, rows: list[Row], moved: Collection[str] = (), old: Mapping[str, Any] = {}, values: Mapping[str, Any] = {}
) -> dict[str, dict[str, Any]]:
    """The fields of each row in TransferQueue, by key, when verl's worker would get it. A critic says the row's
    `values`, or 0. The trainer's logprobs are the engine's unless `old` has others, and for the rows `moved` they are 2
    higher. """
    memory = MemoryQueue()
    rows = [row if row.advantages is not None else replace(row, advantages=0 * row.logprobs) for row in rows]
    with patch.object(queue, "tq", memory):
        queue.put_rows(rows, 1)
    made._rewards = {row.key: row.reward for row in rows}
    tags = [queue.row_tag(row, 1) | {"is_padding": row.group == "pad"} for row in rows]
    batch = KVBatchMeta(keys=[row.key for row in rows], tags=tags, partition_id="train")
    for key, fields in memory.rows.items():
        if "rollout_log_probs" in fields:
            fields["old_log_probs"] = old.get(key, fields["rollout_log_probs"]) + 2 * (key in moved)
            fields["values"] = values.get(key, 0 * fields["rollout_log_probs"])
    with patch.object(trainer_base, "tq", memory), patch.object(trainer, "tq", memory):
        made._compute_advantage(batch, {})
    return memory.rows


def stored(tiny: Path, rows: list[Row], *, moved: Collection[str] = (), **options: Any) -> dict[str, dict[str, Any]]:
    """`passed` through a trainer of these `options`."""
    return passed(a_trainer(tiny, **options), rows, moved)


def advantages(tiny: Path, rows: list[Row], **options: Any) -> dict[str, list[float]]:
    """The advantage of each row's sampled tokens, by key."""
    found = stored(tiny, rows, **options)
    return {row.key: found[row.key]["advantages"].tolist() for row in rows}


def group(split: bool) -> list[Row]:
    """Two groups of four episodes with different rewards; `split` breaks every other episode into one row a call. The
    rows have what credit by turn gives the calls, too."""
    pick, turns = random.Random(7), random.Random(8)
    rows = []
    for g in range(2):
        talks = [conversation(10 * g + s, turns=3) for s in range(4)]
        rewards = [pick.random() for _ in talks]
        calls = credit([
            TurnSession(reward, (talk,), talk.sample, tuple(TurnReward(call, turns.random()) for call in talk.calls))
            for talk, reward in zip(talks, rewards, strict=True)
        ], ByTurn())  # fmt: skip
        for s, (talk, reward) in enumerate(zip(talks, rewards, strict=True)):
            mine = unmerged(talk) if split and s % 2 == 0 else [talk]
            rows += [to_row(f"g{g}", s, i, reward, sample, calls=calls[s]) for i, sample in enumerate(mine)]
    return rows


def of_episodes(rows: list[Row], values: dict[str, list[float]]) -> dict[str, list[float]]:
    """The advantages of each episode's sampled tokens, in order of the tokens."""
    out: dict[str, list[float]] = {}
    for row in rows:
        mine = [value for value, bit in zip(values[row.key], row.mask, strict=True) if bit]
        out.setdefault(f"{row.group}_{row.session}", []).extend(mine)
        assert all(value == 0 for value, bit in zip(values[row.key], row.mask, strict=True) if not bit)
    return out


@pytest.mark.parametrize("estimator", [*GROUPED, *BY_CALL])
def test_a_group_baseline_counts_episodes(estimator: str, tiny: Path) -> None:
    whole, split = group(False), group(True)
    assert len(split) > len(whole)
    one = of_episodes(whole, advantages(tiny, whole, adv_estimator=estimator))
    two = of_episodes(split, advantages(tiny, split, adv_estimator=estimator))
    assert any(value != 0 for values in one.values() for value in values)
    for name, values in one.items():
        assert two[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


def padding(number: int) -> Row:
    """A row such as verl fills up a batch with: 128 tokens, of which none is trained."""
    prompt, one, zero = np.ones(127, dtype=np.int64), np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    nothing = np.zeros(1, dtype=np.float32)
    return Row("pad", number, 0, prompt, one, zero, nothing, reward=0.0, turns=0, min_version=0, max_version=0)


@pytest.mark.parametrize("estimator", [*GROUPED, *BY_CALL])
def test_padding_is_no_session(estimator: str, tiny: Path) -> None:
    """It changes no baseline and no factor that counts answers, and has no advantage itself."""
    rows = group(True)
    plain = advantages(tiny, rows, adv_estimator=estimator)
    filled = advantages(tiny, [*rows, padding(0), padding(1)], adv_estimator=estimator)
    for row in rows:
        assert filled[row.key] == pytest.approx(plain[row.key], rel=1e-5), row.key
    assert filled["pad_0_0"] == filled["pad_1_0"] == [0.0]


@pytest.mark.parametrize(("options", "policy", "others"), [
    ({"mode": "token-mean"}, None, None),
    ({"mode": "seq-mean-token-sum"}, 11 / 8, 11 / 8),
    ({"mode": "seq-mean-token-mean"}, 11 / 8, 11 / 8),
    ({"mode": "token-mean", "loss": "sapo"}, 11 / 8, None),
    ({"mode": "token-mean", "loss": "geo_mean"}, 11 / 8, None),
])  # fmt: skip
def test_padding_does_not_dilute_a_mean_over_sequences(
    options: dict[str, str], policy: float | None, others: float | None, tiny: Path,

) -> None:
    rows = group(False)
    found = stored(tiny, [*rows, *map(padding, range(3))], adv_estimator="rloo", **options)
    for row in rows:
        for name, factor in (("rollout_is_weights", policy), ("row_weights", others)):
            assert (name in found[row.key]) == (factor is not None)
            assert factor is None or found[row.key][name].tolist() == pytest.approx([factor] * len(row.mask))
    assert found["pad_0_0"]["advantages"].tolist() == [0.0]


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_rejected_episode_changes_the_weight_of_no_other(mode: str, tiny: Path) -> None:
    correction = {"rollout_correction.rollout_rs": "seq_mean_k1", "rollout_correction.rollout_rs_threshold": "0.5_2.0"}
    rows = group(True)
    mine = {row.key for row in rows if (row.group, row.session) == ("g1", 2)}
    options: dict[str, Any] = {"adv_estimator": "rloo", "mode": mode, **correction}
    plain = stored(tiny, rows, **options)
    found = stored(tiny, rows, moved=mine, **options)
    for row in rows:
        kept = 0 if row.key in mine else row.sampled
        assert (int(plain[row.key]["response_mask"].sum()), int(found[row.key]["response_mask"].sum())) == (
            row.sampled, kept,
        )  # fmt: skip
        for name in ("rollout_is_weights", "row_weights", "advantages"):
            if row.key not in mine:
                assert found[row.key][name].tolist() == plain[row.key][name].tolist()


def test_the_weights_of_a_correction_are_kept(tiny: Path) -> None:
    rows = [*group(False), padding(0)]
    correction = {"rollout_correction.rollout_is": "token", "rollout_correction.rollout_is_threshold": 100.0}
    found = stored(
        tiny, rows, moved=[rows[0].key], adv_estimator="rloo", mode="seq-mean-token-sum", **correction
    )
    for row, ratio in ((rows[0], math.exp(2)), (rows[1], 1.0)):
        assert found[row.key]["rollout_is_weights"].tolist() == pytest.approx(list(9 / 8 * ratio * row.mask))


@pytest.mark.parametrize("estimator", ["grpo", "grpo_passk"])
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_pass_at_k_is_never_given_one_row_of_padding(estimator: str, processes: int, tiny: Path) -> None:
    made = trainer.AjetTrainer.__new__(trainer.AjetTrainer)
    verl = {"algorithm.adv_estimator": estimator, "trainer.n_gpus_per_node": processes}
    made.config = settings.compose(Config(model=str(tiny), verl=verl), "cpu", None)
    made.actor_rollout_wg, made.global_steps = SimpleNamespace(_dispatch_info={"actor": list(range(processes))}), 0
    filled = set()
    for made.updates in (1, 2, 3):
        for count in range(1, 40):
            made.begin((group(False) * 5)[:count])
            share = made.config.actor_rollout_ref.actor.ppo_mini_batch_size
            assert share % processes == 0
            filled.add(share * made._dealt.updates - count)
    assert (1 in filled) == (estimator == "grpo")


EQUAL = [[0.7] * 8, [-12.6] * 8, [1000.1] * 16, [1 / 3] * 7, [1e12] * 5, [0.1 + 0.1 + 0.1, 0.3, 0.3], [0.0] * 3]


@pytest.mark.parametrize("estimator", [*GROUPED, "ajet_turn", "reinforce_plus_plus", "gae"])
@pytest.mark.parametrize("scaled", [True, False])
def test_equal_rewards_are_not_trained(estimator: str, scaled: bool, tiny: Path) -> None:
    """Whatever their value, in whole episodes and in split ones, next to padding, in one group or more."""
    options: dict[str, Any] = {"adv_estimator": estimator}
    if not scaled:
        if estimator not in ("grpo", "grpo_passk", "ajet_turn"):
            pytest.skip("has no such option")
        options["norm_adv_by_std_in_grpo"] = False
    by_turn = ByTurn(scaled=scaled) if estimator == "ajet_turn" else None
    for number, rewards in enumerate(EQUAL):
        talks = [conversation(number * 20 + place, turns=2) for place in range(len(rewards))]
        groups = [Group("t", tuple(
            BatchEpisode(f"e{part}-{n}", "t", "policy", reward, (), tuple(unmerged(talk) if n % 2 else [talk]))
            for n, (talk, reward) in enumerate(zip(talks, rewards, strict=True))
        )) for part in range(1 + number % 2)]  # fmt: skip
        rows = [*to_rows("b", groups, by_turn=by_turn), padding(0), padding(1)]
        found = advantages(tiny, rows, **options)
        assert {value for values in found.values() for value in values} == {0.0}, rewards


@pytest.mark.parametrize("estimator", GROUPED)
@pytest.mark.parametrize("shift", [1.0, 1000.1, -3e6])
def test_a_real_difference_is_told_whatever_the_rewards_are_large_by(estimator: str, shift: float, tiny: Path) -> None:
    """A baseline takes a shift away. Float32 has no digits left for these differences."""
    rows = [replace(row, reward=shift + 0.001 * row.session) for row in group(False)]
    found = advantages(tiny, rows, adv_estimator=estimator)
    plain = advantages(
        tiny, [replace(row, reward=0.5 + 0.001 * row.session) for row in rows], adv_estimator=estimator
    )
    for key, values in found.items():
        assert values == pytest.approx(plain[key], rel=1e-5, abs=1e-9), key
    assert any(value != 0 for values in found.values() for value in values)
