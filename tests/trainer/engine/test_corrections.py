"""Importance correction over sequences: a call has the weight of a call, whatever timeline it was merged into.

Each step is a real one: logprobs of the model, verl's correction, and the gradient of verl's losses. It is compared
with a correction that is written here, from the logprobs of calls.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import get_kl_controller, get_policy_loss_fn
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from ajet_trainer.backends.verl import rows as queue
from ajet_trainer.backends.verl import trainer
from ajet_trainer.backends.verl.estimators import GROUPED
from ajet_trainer.backends.verl.refused import BY_ROW, LOSSES, NO_RATIO
from ajet_trainer.batch import Row, to_row
from tests.kit.learner import old_logprobs
from tests.trainer.engine.test_estimators import a_trainer, group, padding, passed
from tests.trainer.engine.test_gradient import MODES, close, conversation, gradient, step_data, unmerged
from tests.trainer.engine.whole_step import Steps

EXACT = 5e-6
MOST, LEAST = 1.4, 0.6
"""The threshold of weights, which some calls are above, and the lower bound that rejects others."""
SEQUENCE = {"rollout_correction.rollout_is": "sequence", "rollout_correction.rollout_is_threshold": MOST}
REJECT = {"rollout_correction.rollout_rs": "seq_sum_k1", "rollout_correction.rollout_rs_threshold": f"{LEAST}_{MOST}"}
corrected = partial(Steps, own=True)
Call = tuple[str, int, str]
"""Its group, its episode, its name."""


def episodes(split: bool) -> list[Row]:
    """Two groups of three episodes of four calls; `split` breaks every other one into one row a call."""
    pick, rows = random.Random(5), []
    for g in range(2):
        for s in range(3):
            talk = conversation(10 * g + s, turns=4)
            mine = unmerged(talk) if split and s % 2 == 0 else [talk]
            rows += [to_row(f"g{g}", s, i, reward, sample)
                     for reward in (pick.random(),) for i, sample in enumerate(mine)]  # fmt: skip
    return rows


def of_calls(rows: list[Row], made: dict[str, dict[str, Any]], name: str) -> dict[Call, list[float]]:
    """The values of the field `name` at the tokens of each call. Nothing but 0 stands between the calls."""
    out = {}
    for row in rows:
        values = made[row.key][name].numpy()
        assert not (values * (1 - row.mask)).any()
        for call, start, end in row.spans:
            out[row.group, row.session, call] = values[start:end].tolist()
    return out


def ratios(worker: Any) -> dict[Call, float]:
    """By hand: what the trainer thinks of all tokens of a call together, over what the engine thought of them."""
    out = {}
    for row in (rows := episodes(True)):
        (old,) = old_logprobs(worker, [row])
        for call, start, end in row.spans:
            of_call = old.numpy()[start:end].astype(np.float64) - row.logprobs[start:end]
            out[row.group, row.session, call] = float(np.exp(of_call.sum()))
    assert len(rows) < len(out)
    return out


def test_a_call_has_the_product_of_its_own_ratios(worker: Any, tiny: Path) -> None:
    """Merged, split or filled up, and truncated above the threshold. A row's product is another quantity."""
    expected = ratios(worker)
    assert min(expected.values()) < LEAST and max(expected.values()) > MOST and len(expected) == 24
    steps = corrected(tiny, worker, **SEQUENCE)
    for rows in (episodes(False), episodes(True), [*episodes(True), padding(0), padding(1)]):
        made = steps.put(rows)
        found = of_calls(rows, made, "rollout_is_weights")
        for call, values in found.items():
            assert values == pytest.approx([min(expected[call], MOST)] * len(values), abs=EXACT)
        assert found.keys() == expected.keys()
    row = episodes(False)[0]
    product = np.prod([expected[row.group, row.session, call] for call, _, _ in row.spans])
    assert all(abs(product - ratio) > 0.1 for (*name, _), ratio in expected.items() if name == [row.group, row.session])


def test_rows_that_verl_fills_up_with_change_nothing(worker: Any, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """They are copies of the first row, but for the response: what numbers the calls is as long as that row's."""
    def fields(row: Row) -> dict[str, Any]:
        if row.sampled:
            return made(row)
        template, _ = construct_minimal_padding_template(made(first), {}, 0)
        del template["attention_mask"]
        return {**template, "uid": row.group}

    made, rows, steps = queue.row_fields, episodes(True), corrected(tiny, worker, **SEQUENCE, **REJECT)
    first = replace(rows[0], advantages=0 * rows[0].logprobs)  # as `passed` puts it
    plain = steps.put(rows)
    monkeypatch.setattr(queue, "row_fields", fields)
    filled = steps.put([*rows, padding(0), padding(1)])
    assert len(filled["pad_0_0"]["calls"]) == len(rows[0].response) > len(filled["pad_0_0"]["response_mask"]) == 1
    assert not filled["pad_0_0"]["response_mask"].any() and not filled["pad_0_0"]["rollout_is_weights"].any()
    for row in rows:
        for name in ("rollout_is_weights", "response_mask", "advantages"):
            assert filled[row.key][name].tolist() == pytest.approx(plain[row.key][name].tolist(), abs=EXACT)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [SEQUENCE, SEQUENCE | REJECT], ids=["weights", "rejections"])
def test_merged_and_split_episodes_have_equal_gradients(
    options: dict[str, Any], mode: str, worker: Any, tiny: Path
) -> None:
    steps = corrected(tiny, worker, mode=mode, **options)
    one = steps.gradient(episodes(False))
    assert np.isfinite(one).all() and np.linalg.norm(one) > 1e-3
    for rows in (episodes(True), [*episodes(True), padding(0), padding(1)]):
        assert close(one, steps.gradient(rows)) < EXACT
    assert close(one, corrected(tiny, worker, mode=mode).gradient(episodes(False))) > 1e-3


def test_the_gradient_is_that_of_weights_by_hand(worker: Any, tiny: Path) -> None:
    """The weights multiply what is found for a token, as `token-mean` adds it up."""
    rows, expected = episodes(False), ratios(worker)
    steps = corrected(tiny, worker, **SEQUENCE)
    made, data = steps.put(rows), step_data(rows, [0.0] * len(rows), pack=150)
    weights = []
    for row in rows:
        mine = torch.zeros(len(row.response))
        for call, start, end in row.spans:
            mine[start:end] = min(expected[row.group, row.session, call], MOST)
        weights.append(mine)
    for name, values in (
        ("advantages", [made[row.key]["advantages"] for row in rows]),
        ("old_log_probs", old_logprobs(worker, rows)), ("rollout_is_weights", weights),
    ):  # fmt: skip
        data[name] = torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
    by_hand = gradient(worker, data, loss_agg_mode="token-mean", entropy_coeff=0.01)
    assert close(by_hand, steps.gradient(rows)) < EXACT


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("estimator", [*GROUPED, "gae", "reinforce_plus_plus"])
def test_a_rejected_call_takes_its_own_tokens_alone(estimator: str, split: bool, worker: Any, tiny: Path) -> None:
    """No advantage moves, not even that of the calls before a rejected last one, at which the reward stands."""
    if split and estimator not in GROUPED:
        pytest.skip("its values go along one row")
    expected = ratios(worker)
    rows = [*episodes(split), *([padding(0)] if split and estimator != "grpo_passk" else [])]
    plain = corrected(tiny, worker, estimator).put(rows)
    made = corrected(tiny, worker, estimator, **REJECT).put(rows)
    kept = of_calls(rows, made, "response_mask")
    out = {call for call, ratio in expected.items() if not LEAST <= 1 / ratio <= MOST}
    assert any(name == "c3" for _, _, name in out) and 3 < len(out) < 21
    for call, values in kept.items():
        assert values == [call not in out] * len(values), call
    for row in rows:
        assert made[row.key]["advantages"].tolist() == plain[row.key]["advantages"].tolist()


@pytest.mark.parametrize("estimator", [*GROUPED, "gae", "reinforce_plus_plus"])
def test_rejected_tokens_move_no_advantage(estimator: str, worker: Any, tiny: Path) -> None:
    """Not even a last one, at which the reward stands, nor those of a group of which nothing is left."""
    far = {"g0": 0, "g1": 9}
    rows = [replace(one, logprobs=(one.logprobs - far[one.group] * one.mask).astype(np.float32))
            for one in episodes(False)]  # fmt: skip
    by_tokens = {"rollout_correction.rollout_rs": "token_k1", "rollout_correction.rollout_rs_threshold": "0.9_1.1"}
    plain, made = (corrected(tiny, worker, estimator, **options).put(rows) for options in ({}, by_tokens))
    assert any(made[row.key]["response_mask"].any() and not made[row.key]["response_mask"][-1] for row in rows)
    assert not any(made[row.key]["response_mask"].any() for row in rows if row.group == "g1")
    for row in rows:
        assert made[row.key]["advantages"].tolist() == plain[row.key]["advantages"].tolist()


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_call_far_off_changes_the_weight_of_no_other_episode(mode: str, worker: Any, tiny: Path) -> None:
    """Neither the weights nor the rejections of one see another."""
    rows, steps = [*episodes(True), padding(0)], corrected(tiny, worker, mode=mode, **SEQUENCE, **REJECT)
    plain = steps.put(rows)
    mine = next(row for row in rows if row.session == 0 and plain[row.key]["response_mask"].any())
    off = replace(mine, logprobs=(mine.logprobs + mine.mask).astype(np.float32))
    made = steps.put([off if row is mine else row for row in rows])
    assert not made[mine.key]["response_mask"].any()
    for row in rows:
        if (row.group, row.session) != (mine.group, mine.session):
            for name in ("rollout_is_weights", "row_weights", "response_mask", "advantages"):
                assert made[row.key][name].tolist() == plain[row.key][name].tolist(), name


def test_weights_are_normalized_over_calls(worker: Any, tiny: Path) -> None:
    """`rollout_is_batch_normalize` divides by the mean of the calls' weights, each counted once."""
    options = SEQUENCE | {"rollout_correction.rollout_is_batch_normalize": True}
    steps, expected = corrected(tiny, worker, **options), ratios(worker)
    mean = sum(min(ratio, MOST) for ratio in expected.values()) / len(expected)
    for rows in (episodes(False), [*episodes(True), padding(0)]):
        for call, values in of_calls(rows, steps.put(rows), "rollout_is_weights").items():
            assert values == pytest.approx([min(expected[call], MOST) / mean] * len(values), abs=EXACT)


@pytest.mark.parametrize("options", [
    {"rollout_correction.rollout_is": "token"},
    {"rollout_correction.rollout_rs": "token_k1", "rollout_correction.rollout_rs_threshold": "0.9_1.1"},
])  # fmt: skip
def test_what_goes_by_tokens_is_left_to_verl(
    options: dict[str, Any], worker: Any, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    rows, steps = episodes(False), corrected(tiny, worker, **options)
    monkeypatch.setattr(trainer, "by_call", None)
    made = steps.put(rows)
    fields = ("old_log_probs", "rollout_log_probs")
    data = {
        name: torch.nested.as_nested_tensor([made[row.key][name] for row in rows], layout=torch.jagged)
        for name in (*fields, "loss_mask")
    }  # fmt: skip
    padded = {name: values.to_padded_tensor(0) for name, values in data.items()}
    padded["response_mask"] = padded.pop("loss_mask")
    theirs, _ = compute_rollout_correction_and_add_to_batch(
        DataProto.from_single_dict(padded), steps.trainer.config.algorithm.rollout_correction
    )
    for name in {"response_mask", "rollout_is_weights"} & theirs.batch.keys():
        for row, values in zip(rows, theirs.batch[name], strict=True):
            assert made[row.key][name].tolist() == values[: len(row.response)].tolist()


def test_a_calls_tokens_need_not_stand_together(worker: Any, tiny: Path) -> None:
    """A call that is left out of a row stands between others, which keep their own weights."""
    expected = ratios(worker)
    rows = []
    for row in episodes(False):
        _, (_, start, end), *_ = row.spans
        mask = row.mask.copy()
        mask[start:end] = 0
        rows.append(replace(row, mask=mask, logprobs=row.logprobs * mask.astype(np.float32)))
    found = of_calls(rows, corrected(tiny, worker, **SEQUENCE).put(rows), "rollout_is_weights")
    for call, values in found.items():
        weight = 0.0 if call[2] == "c1" else min(expected[call], MOST)
        assert values == pytest.approx([weight] * len(values), abs=EXACT)


LOGPROBS = [-1.0, -9.0, -0.5, -1.5]


def weighed(loss: str, weights: list[float] | None = None, old: list[float] = LOGPROBS) -> list[float]:
    """The gradient at each token's logprob of one row, by verl's own `loss`, with these weights."""
    config = FSDPActorConfig(
        strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1, policy_loss=PolicyLossConfig(
            loss_mode=loss, dro_beta=0.1
        )
    )  # fmt: skip
    log_prob, ones = torch.tensor([LOGPROBS], requires_grad=True), torch.ones(1, 4)
    value, _ = get_policy_loss_fn(loss)(
        old_log_prob=torch.tensor([old]) - 0.05, log_prob=log_prob, advantages=ones, response_mask=ones,
        loss_agg_mode="token-mean", config=config,
        rollout_is_weights=None if weights is None else torch.tensor([weights]),
    )
    value.backward()
    return [float(one) for one in log_prob.grad[0]]


def losses() -> list[str]:
    """Those of verl's that a run may have."""
    registry = core_algos.POLICY_LOSS_REGISTRY
    return [name for name, loss in registry.items() if name not in LOSSES and loss.__module__ == core_algos.__name__]


def test_each_loss_that_may_correct_weighs_single_tokens() -> None:
    """A token that was forced, which the trainer finds unlikely, hardly moves anything; `geo_mean` sees to no token."""
    forced = [1.0, 1e-4, 1.0, 1.0]
    for loss in losses():
        plain, corrected = weighed(loss, [1.0] * 4), weighed(loss, forced)
        assert all(abs(one) > 1e-3 for one in plain), loss
        expected = [weight * one for weight, one in zip(forced, plain, strict=True)]
        assert (corrected == pytest.approx(expected, rel=1e-5, abs=1e-9)) == (loss not in BY_ROW), loss


def test_without_weights_only_a_ratio_of_its_own_keeps_a_forced_token_small() -> None:
    """In bypass mode, where the old logprobs are the engine's, which says 0 of a token that was forced."""
    engine = [LOGPROBS[0], 0.0, *LOGPROBS[2:]]
    for loss in losses():
        first, forced, *_ = weighed(loss, old=engine)
        assert (abs(forced) < 0.01 * abs(first)) == (loss not in (*BY_ROW, *NO_RATIO)), loss


@pytest.mark.parametrize("correction", [{"rollout_correction.rollout_is": "token"}, SEQUENCE])
def test_the_figure_of_a_kl_in_rewards_counts_rows_that_sampled(correction: dict[str, Any], tiny: Path) -> None:
    made, found = a_trainer(tiny, adv_estimator="rloo", use_kl_in_reward=True, **correction), []
    made.kl_ctrl_in_reward = get_kl_controller(made.config.algorithm.kl_ctrl)
    weigh = type(made)._compute_advantage

    def compared(batch: Any, _: object) -> Any:
        for fields in trainer.tq.rows.values():
            fields["ref_log_prob"] = fields["old_log_probs"] - 0.25
        figures: dict[str, float] = {}
        weigh(made, batch, figures)
        found.append(figures["actor/reward_kl_penalty"])

    made._compute_advantage = compared
    for rows in (0, 1, 3):
        passed(made, [*group(False), *[padding(number) for number in range(rows)]])
    assert found == pytest.approx([0.25] * 3, rel=1e-4)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_figures_of_a_correction_count_rows_that_sampled(rows: int, tiny: Path) -> None:
    made = a_trainer(tiny, adv_estimator="rloo", **{"rollout_correction.rollout_is": "token"})
    found: list[dict[str, float]] = []
    weigh = type(made)._compute_advantage
    for padded in ([], [padding(number) for number in range(rows)]):
        figures: dict[str, float] = {}
        made._compute_advantage = lambda batch, _, into=figures: weigh(made, batch, into)
        passed(made, [*group(False), *padded])
        found.append({name: value for name, value in figures.items() if name.startswith("rollout_corr/")})
    assert found[0]["rollout_corr/training_ppl"] > 1
    assert found[1] == pytest.approx(found[0])
