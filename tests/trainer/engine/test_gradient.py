"""Design decision 10 on verl's own path: packed rows through the engine, verl's losses, and the gradient they leave."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.padding import response_from_nested

from ajet_sdk.sample import Sample
from ajet_trainer.advantage import row_weights
from ajet_trainer.backends.verl.losses import session_loss
from ajet_trainer.backends.verl.rows import row_fields
from ajet_trainer.batch import Row, to_row

VOCABULARY = 500
SCALE = 700
"""The ``loss_scale_factor`` that ajet sets: `max_tokens`."""
DESCENT = {"optimizer": "SGD", "lr": 1.0, "weight_decay": 0.0}
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def conversation(seed: int, turns: int) -> Sample:
    """`turns` calls of random tokens merged into one timeline, with plausible logprobs."""
    pick = random.Random(seed)
    ids, mask, spans = [pick.randrange(VOCABULARY) for _ in range(pick.randint(4, 9))], [], []
    mask += [0] * len(ids)
    for turn in range(turns):
        if turn:
            between = [pick.randrange(VOCABULARY) for _ in range(pick.randint(2, 6))]
            ids += between
            mask += [0] * len(between)
        sampled = [pick.randrange(VOCABULARY) for _ in range(pick.randint(3, 8))]
        spans.append((f"c{turn}", len(ids), len(ids) + len(sampled)))
        ids += sampled
        mask += [1] * len(sampled)
    logprobs = tuple(-6.3 + pick.random() * 0.02 if bit else 0.0 for bit in mask)
    return Sample(
        f"s{seed}", "e", "t", "policy", "", tuple(ids), tuple(mask), logprobs, ((0, sum(mask)),),
        tuple(call for call, _, _ in spans), tuple(spans), ("stop",) * turns, tuple(range(turns)),
    )  # fmt: skip


def unmerged(sample: Sample) -> list[Sample]:
    """One sample a call, as the merge policy `off` makes them."""
    return [
        replace(
            sample, sample=f"{sample.sample}.{call}", token_ids=sample.token_ids[:end],
            loss_mask=(0,) * start + (1,) * (end - start),
            logprobs=(0.0,) * start + sample.logprobs[start:end], policy_versions=((0, end - start),),
            calls=(call,), spans=((call, start, end),), finish_reasons=("stop",), turns=(turn,),
        )
        for turn, (call, start, end) in enumerate(sample.spans)
    ]  # fmt: skip


def rows_of(samples: list[list[Sample]]) -> list[Row]:
    """Rows of a group whose episodes have these samples."""
    return [
        to_row("g", s, i, 1.0, sample) for s, mine in enumerate(samples) for i, sample in enumerate(mine)
    ]


def step_data(
    rows: list[Row], advantages: list[float], noise: float = 0.0, pack: int = 256, mean: str = "token-mean",
    policy: str = "", packed: bool = True,
) -> Any:
    """The rows as the trainer's workers get them, with one advantage an episode; `noise` goes to masked places only.

    A micro-batch has at most `pack` tokens, `packed` or padded. The rows weigh as the trainer lets them under
    ``loss_agg_mode`` `mean`; `policy` is another mean for the policy term.
    """
    made: list[dict[str, Any]] = []
    keys, sampled = [row.key for row in rows], [row.sampled for row in rows]
    wanted = {"rollout_is_weights": policy or mean, "row_weights": mean}
    weights = {
        name: found for name, mode in wanted.items()
        if (found := row_weights(mode, keys, sampled, sampled)) is not None
    }  # fmt: skip
    for index, row in enumerate(rows):
        fields = row_fields(replace(row, advantages=None))  # the ones given count
        mask = fields["response_mask"].float()
        dirt = noise * (1 - mask)
        fields["old_log_probs"] = fields["rollout_log_probs"] + dirt
        fields["ref_log_prob"] = (fields["rollout_log_probs"] - 0.1) * mask - dirt
        fields["advantages"] = advantages[row.session] * mask + dirt
        for name, found in weights.items():
            fields[name] = float(found[index]) * torch.ones_like(mask)
        made.append(fields)
    data = list_of_dict_to_tensordict(made)
    tu.assign_non_tensor(
        data, temperature=1.0, pad_token_id=0, global_batch_size=len(rows), use_remove_padding=packed,
        use_dynamic_bsz=True, max_token_len_per_gpu=pack, use_fused_kernels=False, calculate_entropy=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return data


def flat(parts: Iterable[Any]) -> np.ndarray[Any, Any]:
    """The parts as one vector, put together of what processes hold."""
    whole = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts]
    return torch.cat([part.flatten() for part in whole]).double().cpu().numpy()


def loss_of(**options: Any) -> Any:
    """The loss of an actor with these `options`, as the trainer gives it to its workers."""
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **options)
    return partial(session_loss, config=config)


def gradient(worker: Any, data: Any, **options: Any) -> np.ndarray[Any, Any]:
    """The gradient that the trainer's loss leaves in the model, as one vector."""
    engine = worker.engine
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss_of(**{"loss_scale_factor": SCALE} | options))
        return flat(p.grad for p in engine.module.parameters() if p.requires_grad)


def weights(worker: Any) -> np.ndarray[Any, Any]:
    """All that it trains, as one vector."""
    return flat(p.detach() for p in worker.engine.module.parameters() if p.requires_grad)


def one_step(worker: Any, data: Any, loss: Any, rows: int, **more: Any) -> tuple[np.ndarray[Any, Any], Any]:
    """The distance by which a step of `worker` on its share `data` moves its weights, with so many `rows` in an update,
    and its metrics."""
    tu.assign_non_tensor(data, mini_batch_size=rows, global_batch_size=rows, **more)
    worker.set_loss_fn(loss)
    before = weights(worker)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    return weights(worker) - before, metrics


def close(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """The distance of two gradients, relative to their size."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


FULL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.05}


def test_merged_samples_have_the_gradient_of_their_calls(worker: Any) -> None:
    """The policy, KL and entropy terms together, to five digits, from fewer tokens."""
    talks = [conversation(seed, turns=4) for seed in range(3)]
    merged, calls = rows_of([[talk] for talk in talks]), rows_of([unmerged(talk) for talk in talks])
    assert sum(row.sampled for row in merged) == sum(row.sampled for row in calls)
    assert sum(row.tokens for row in merged) < 0.6 * sum(row.tokens for row in calls)
    advantages = [1.3, -0.4, -0.9]
    one = gradient(worker, step_data(merged, advantages), loss_agg_mode="token-mean", **FULL)
    many = gradient(worker, step_data(calls, advantages), loss_agg_mode="token-mean", **FULL)
    assert np.linalg.norm(one) > 1e-3
    assert close(one, many) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_that_splits_weighs_no_more(worker: Any, mode: str) -> None:
    """With the weights of `ajet_trainer.advantage` no term sees how episodes split into rows, nor padding."""
    talks = [conversation(seed, turns=3) for seed in range(2)]
    whole = rows_of([[talk] for talk in talks])
    split = rows_of([unmerged(talks[0]), [talks[1]]])
    nothing = replace(whole[0], mask=0 * whole[0].mask, session=2)
    advantages = [0.8, -1.1, 0.0]
    one = gradient(worker, step_data(whole, advantages, mean=mode), loss_agg_mode=mode, **FULL)
    for rows in (split, [*whole, nothing], [*split, nothing]):
        data = step_data(rows, advantages, mean=mode)
        assert close(one, gradient(worker, data, loss_agg_mode=mode, **FULL)) < 5e-6
    if mode != "token-mean":
        assert close(one, gradient(worker, step_data(rows, advantages), loss_agg_mode=mode, **FULL)) > 1e-2


@pytest.mark.parametrize("pack", [256, 40])
def test_geo_mean_is_one_mean_over_the_update(worker: Any, pack: int) -> None:
    """However its rows are split, packed or filled up. It is compared with a mean over sequences, which it equals where
    nothing has moved: there its ratio is 1, and its gradient that of the mean over a row's tokens."""
    talks = [conversation(seed, turns=2) for seed in range(3)]
    advantages, geo = [1.0, 0.2, -1.2, 0.0], {"policy_loss": PolicyLossConfig(loss_mode="geo_mean")}
    whole = rows_of([[talk] for talk in talks])
    nothing = replace(whole[0], mask=0 * whole[0].mask, session=3)
    split = rows_of([[talks[0]], unmerged(talks[1]), [talks[2]]])
    data = still(worker, step_data(whole, advantages))
    expected = gradient(worker, data, loss_agg_mode="seq-mean-token-mean")
    for rows in (whole, [*whole, nothing], [*split, nothing]):
        data = still(worker, step_data(rows, advantages, pack=pack, policy="seq-mean-token-mean"))
        assert close(expected, gradient(worker, data, **geo)) < 5e-6


def still(worker: Any, data: Any) -> Any:
    """`data` with the model's own logprobs as the old ones."""
    with worker.engine.eval_mode():
        found = worker.engine.infer_batch(data, loss_function=None)["model_output"]["log_probs"]
    data["old_log_probs"] = response_from_nested(found.detach(), data["response_mask"])
    return data


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_leave_no_trace(worker: Any, mode: str) -> None:
    """Garbage at masked places in every input of every term changes the gradient by exactly nothing."""
    rows = rows_of([[conversation(seed, turns=3)] for seed in range(3)])
    advantages = [1.0, 0.2, -1.2]
    clean = gradient(worker, step_data(rows, advantages), loss_agg_mode=mode, **FULL)
    dirty = gradient(worker, step_data(rows, advantages, noise=3.0), loss_agg_mode=mode, **FULL)
    assert np.array_equal(clean, dirty)


@pytest.mark.parametrize("mode", MODES)
def test_packing_leaves_no_trace(worker: Any, mode: str) -> None:
    """Rows one by one or all together; for Dr. GRPO this is what the constant divisor is there for."""
    rows, advantages = rows_of([[conversation(seed, turns=1 + 2 * seed)] for seed in range(3)]), [1.0, 0.2, -1.2]
    longest = max(row.tokens for row in rows)
    together, alone = step_data(rows, advantages), step_data(rows, advantages, pack=longest)
    one = gradient(worker, together, loss_agg_mode=mode, **FULL)
    assert close(one, gradient(worker, alone, loss_agg_mode=mode, **FULL)) < 1e-5
    unset = gradient(worker, alone, loss_agg_mode=mode, loss_scale_factor=None, **FULL)
    if mode == "seq-mean-token-sum-norm":
        sums = gradient(worker, together, loss_agg_mode="seq-mean-token-sum", **FULL)
        assert close(one, sums / SCALE) < 1e-5
        assert close(gradient(worker, together, loss_agg_mode=mode, loss_scale_factor=None, **FULL), unset) > 1e-2
    else:
        assert close(one, unset) < 1e-5


@pytest.mark.parametrize(
    ("choice", "fixed"),
    [
        ({"loss_mode": "clip_cov", "clip_cov_lb": -1e9, "clip_cov_ub": 1e9}, {"clip_cov_lb": 1e9}),
        ({"loss_mode": "kl_cov", "ppo_kl_coef": 1.0}, {"kl_cov_ratio": 1.0}),
    ],
)
def test_a_loss_that_chooses_tokens_does_so_in_each_micro_batch(
    worker: Any, choice: dict[str, Any], fixed: dict[str, Any]
) -> None:
    """At least one, so that rows by themselves have more chosen than rows together. What is done with a chosen token
    does not depend on the packing: it leaves no trace where none are chosen, or all."""
    rows, advantages = rows_of([[conversation(seed, turns=3)] for seed in range(3)]), [1.0, 0.2, -1.2]
    packs = (256, max(row.tokens for row in rows))

    def moved(**options: Any) -> float:
        policy = PolicyLossConfig(**options)
        one, many = (gradient(worker, step_data(rows, advantages, pack=pack), policy_loss=policy) for pack in packs)
        return close(one, many)

    assert moved(**choice) > 1e-3
    assert moved(**choice | fixed) < 5e-6


def test_masked_tokens_have_no_gradient_in_any_policy_loss_of_verl() -> None:
    shape = (4, 12)
    torch.manual_seed(0)
    mask = (torch.rand(shape) < 0.6).float()
    old, advantages = -torch.rand(shape) - 0.5, torch.randn(4, 1) * mask
    tried = []
    for name in sorted(core_algos.POLICY_LOSS_REGISTRY):
        loss_config = PolicyLossConfig(
            loss_mode=name, dro_beta=0.1, rollout_correction=RolloutCorrectionConfig.bypass_pg_is()
        )
        config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, policy_loss=loss_config)
        config.global_batch_info.update(
            dp_size=1, batch_num_tokens=mask.sum().item(), global_batch_size=4, loss_scale_factor=None
        )
        log_prob = (old + 0.02 * torch.randn(shape)).requires_grad_(True)
        loss, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=old, log_prob=log_prob, advantages=advantages, response_mask=mask.bool(),
            loss_agg_mode="token-mean", config=config, rollout_is_weights=None,
        )  # fmt: skip
        loss.backward()
        assert float(log_prob.grad.abs().sum()) > 0, name
        assert float((log_prob.grad * (1 - mask)).abs().sum()) == 0.0, name
        tried.append(name)
    assert {"vanilla", "gspo", "clip_cov", "bypass_mode"} <= set(tried)
    assert len(tried) >= 12
