"""verl's V1 `PPOTrainer`, fed by leases instead of a dataset: the end of the line, where samples become a gradient.

What is verl's stays verl's: workers, engines, advantages, losses, rollout correction, checkpoints, metrics. This class
says how rows are dealt into updates, and what one episode weighs when it came apart into several rows. In a checkpoint
the trained batches stand in for a dataset, so that they are saved and restored with the weights.

Invariant: a step trains exactly the rows it was given, however many rows the episodes split into. It makes
``groups / ppo_mini_batch_size`` optimizer updates, each on whole groups; fewer where it was given fewer groups.

Next: the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.utils.padding import response_to_nested

from ajet_trainer.advantage import group_of, row_weights
from ajet_trainer.agreement import ENOUGH, OtherWeights, fresh_kl
from ajet_trainer.backends.verl import advantages
from ajet_trainer.backends.verl.corrections import READ, by_call, figures, left_out, over_sequences
from ajet_trainer.backends.verl.estimators import BY_CALL, GROUPED, by_turn
from ajet_trainer.backends.verl.losses import session_loss
from ajet_trainer.backends.verl.micro_batches import ours
from ajet_trainer.backends.verl.positions import trained_at
from ajet_trainer.backends.verl.rows import OF_TURNS
from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.updates import deal, together

MEANS = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
"""Losses of verl that are a mean of their own, whatever ``loss_agg_mode`` says."""


class Leases:
    """Stands where verl expects a dataloader. What a checkpoint keeps of the data is the trained batches."""

    def __init__(self) -> None:
        self.batches: Mapping[str, Any] = {}

    def state_dict(self) -> Mapping[str, Any]:
        return self.batches

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = state


class Launched(LLMServerManager):  # type: ignore[misc]
    """verl's engines, without the process that deals requests out among them: agents reach them through the proxy."""

    async def _init_global_load_balancer(self) -> None: ...


class Elsewhere(Launched):
    """Stands where verl expects its engines. No class of engines is known, so vLLM is not imported to have one."""

    rollout_replica_class = None


@register_trainer("ajet")
class AjetTrainer(PPOTrainer):  # type: ignore[misc]
    """verl's trainer of a step, as `VerlLearner` drives it. With `hybrid`, verl launches the engines. `init` must have
    run before anything else."""

    def __init__(self, config: DictConfig, ours: Config, *, hybrid: bool) -> None:
        self._enable_hybrid_replicas = hybrid
        super().__init__(config)
        self.trainer_mode = "sync"  # nothing in TransferQueue outlives a step, so checkpoints need not hold it
        self.ours = ours
        self.updates = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size

    # What verl asks of a trainer -----------------------------------------------------------------------------------

    def _setup(self) -> None:
        engines = Launched if self._enable_hybrid_replicas else Elsewhere
        with ours(trainer_base, "LLMServerManager", engines):
            super()._setup()

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        self.vocabulary = getattr(model.hf_config.get_text_config(), "vocab_size", None)
        dtype = getattr(model.hf_config, "dtype", None)
        self.dtype = dtype and str(dtype).removeprefix("torch.")
        self.trained_at = trained_at(model.hf_config.get_text_config())

    def _init_dataloader(self) -> None:
        self.train_dataloader = self.val_dataloader = Leases()
        self.steps_per_epoch = self.total_training_steps = self.config.trainer.total_training_steps
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps
            self.config.critic.optim.total_training_steps = self.total_training_steps

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.config.trainer.device == "cpu":
            from ajet_trainer.backends.verl.cpu_worker import CpuActorWorker as Worker
            from ajet_trainer.backends.verl.cpu_worker import CpuCriticWorker as Critic
        else:
            from ajet_trainer.backends.verl.worker import ActorWorker as Worker
            from ajet_trainer.backends.verl.worker import CountingWorker as Critic
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(Critic if role == Role.Critic else Worker)

    def prepare_step(self) -> dict[str, Any]:
        return {}

    def on_init_end(self) -> None:
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(partial(session_loss, config=actor))

    def on_sample_end(self) -> None:
        self.checkpoint_manager.sleep_replicas()

    def on_step_end(self) -> None:
        """Is of verl's own loop, which is not used."""

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict[str, Any], logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        """Orders the batch so that each process finds its part of each update in turn. The rows of an update are those
        of `updates.deal`; which of them a process gets, verl decides by their lengths. A tree's rows stay together."""
        batch = upsample_batch_to_divisible_size(
            batch, self._dealt.rows * self._dealt.updates, self.tokenizer.eos_token_id
        )
        lengths = torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.int64)
        work, parts = calculate_workload(lengths), [list[int]() for _ in range(self._processes)]
        padding = [tag.get("is_padding", False) for tag in batch.tags]
        groups = [None if empty else group_of(key) for key, empty in zip(batch.keys, padding, strict=True)]
        for places in self._dealt.places(groups):
            if self.ours.rows == "tree":
                shares = together(places, batch.keys, len(parts))
            else:
                balanced = get_seqlen_balanced_partitions(work[places], k_partitions=len(parts), equal_size=True)
                shares = [[places[place] for place in share] for share in balanced]
            for part, share in zip(parts, shares, strict=True):
                part += share
        metrics.update(log_seqlen_unbalance(lengths.tolist(), parts, prefix=logging_prefix))
        batch.reorder([place for part in parts for place in part])
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        real = [place for place, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        if over_sequences(correction := self.config.algorithm.rollout_correction):
            with left_out(correction):
                batch = super()._compute_advantage(batch, metrics)
            batch = self._correct_calls(batch, metrics)
        else:
            batch = super()._compute_advantage(batch, metrics)
            if any(name.startswith("rollout_corr/") for name in metrics):
                stored = tq.kv_batch_get(
                    keys=batch.keys, partition_id=batch.partition_id, select_fields=[*READ, "loss_mask"]
                )
                metrics.update(figures(stored.to_padded_tensor(), correction))
        if (name := "actor/reward_kl_penalty") in metrics:  # verl's mean is over all rows, and padding has none
            metrics[name] *= len(batch.keys) / len(real)
        return self._weigh_episodes(batch, real)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        correction = self.config.algorithm.rollout_correction
        if not (correction and correction.get("bypass_mode")):  # there the engine's logprobs are taken for the old ones
            self._compare_fresh(batch.partition_id, metrics)
        return batch

    def _compare_fresh(self, partition: str, metrics: dict[str, Any]) -> None:
        """Raises `OtherWeights` if the engine serves others than those that this step begins with."""
        keys = [row.key for row in self._rows]
        stored = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=["old_log_probs"])
        own = [one.float().numpy()[: len(row.response)] for row, one in
               zip(self._rows, stored["old_log_probs"].unbind(), strict=True)]  # fmt: skip
        kl, tokens = fresh_kl(self._rows, own, self._began)
        metrics |= {"rollout_corr/fresh_kl": kl, "rollout_corr/fresh_tokens": float(tokens)} if tokens else {}
        most = self.ours.max_kl
        if tokens >= ENOUGH and most and not kl <= most:
            raise OtherWeights(
                f"the engine does not serve the weights that this step begins with, or agents sample otherwise than "
                f"they tell: over {tokens} tokens of these weights its KL divergence from the trainer is {kl:.2f} nats "
                f"(max_kl = {most:g}). Nothing was trained of them"
            )

    # Helpers -------------------------------------------------------------------------------------------------------

    def begin(self, rows: Sequence[Row]) -> None:
        """Begins a step on `rows`, and sizes it for them. verl counts mini-batches in rows, we count them in groups.
        verl fills up with masked rows, which are a group by themselves. Pass@k takes no group of one, so there is none
        then."""
        self._rows, self._began = rows, self.global_steps
        self._rewards = {row.key: row.reward for row in rows}
        self.global_steps += 1
        self.timing_raw: dict[str, float] = {}
        lonely = self.config.algorithm.adv_estimator != "grpo_passk"
        self._dealt = deal([row.group for row in rows], self.updates, self._processes, lonely=lonely)
        with open_dict(self.config):
            self.config.data.train_batch_size = len({row.group for row in rows})
            self.config.actor_rollout_ref.actor.ppo_mini_batch_size = self._dealt.rows
            self.config.critic.ppo_mini_batch_size = self._dealt.rows

    def updates_of(self, metrics: dict[str, Any]) -> tuple[int, int]:
        """Counts the optimizer updates that the step has made, and those that it has left out; a critic's count too."""
        made = planned = 0
        for part, settings_of in (("actor", self.config.actor_rollout_ref.actor), ("critic", self.config.critic)):
            if (share := metrics.pop(f"{part}/updates", None)) is not None:
                mine = self._dealt.updates * settings_of.ppo_epochs
                made, planned = made + round(float(share) * mine), planned + mine
        return made, planned - made

    @property
    def _processes(self) -> int:
        """The number of processes that share a batch, which verl asks its workers once."""
        known = self.actor_rollout_wg._dispatch_info
        if "actor" not in known:
            known["actor"] = self.actor_rollout_wg._query_dispatch_info("actor")
        return int(max(known["actor"])) + 1

    def _correct_calls(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Importance weights and rejections over sequences, which are calls. See `corrections`."""
        stored = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*READ, "calls"])
        lengths = stored["response_mask"]
        found, figures = by_call(stored.to_padded_tensor(), self.config.algorithm.rollout_correction)
        metrics.update(figures)
        nested = {name: response_to_nested(values, lengths) for name, values in found.items()}
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(nested, batch_size=len(batch.keys))
        )

    def _weigh_episodes(self, batch: KVBatchMeta, real: list[int]) -> KVBatchMeta:
        """Advantages and weights of sessions, in the place of verl's of rows. `real` are the rows that are no padding:
        estimators with a group baseline see these alone. See `ajet_trainer.advantage` and `advantages`."""
        algorithm = self.config.algorithm
        fields = ["uid", "response_mask", "loss_mask", "rollout_is_weights", "advantages", "returns", OF_TURNS]
        stored = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[*fields, *advantages.READ]
        )
        lengths = stored["response_mask"]
        groups = np.array(stored.pop("uid").tolist(), dtype=object)
        data = DataProto(batch=stored.to_padded_tensor(), non_tensor_batch={"uid": groups})
        found = {name: data.batch[name].float() for name in ("advantages", "returns")}
        compared = DataProto(batch=data.batch.clone(False), non_tensor_batch={"uid": groups})
        compared.batch["response_mask"] = data.batch["loss_mask"]  # advantages are those before a rejection
        if algorithm.adv_estimator in GROUPED:
            keys = [batch.keys[place] for place in real]
            rewards = [self._rewards[key] for key in keys]
            for name, values in advantages.by_session(compared.select_idxs(real), keys, rewards, algorithm).items():
                found[name] = torch.zeros_like(found[name])
                found[name][real] = values
        elif algorithm.adv_estimator in advantages.BY_TOKEN:
            rewards = [self._rewards.get(key, 0.0) for key in batch.keys]
            found |= advantages.by_token(compared, lengths.offsets().diff(), rewards, algorithm)
        elif algorithm.adv_estimator in BY_CALL:
            told, _ = by_turn(data.batch[OF_TURNS], data.batch["response_mask"])
            found = dict.fromkeys(("advantages", "returns", OF_TURNS), told)
        found |= self._weights(data, batch.keys)
        nested = {name: response_to_nested(values, lengths) for name, values in found.items()}
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(nested, batch_size=len(batch.keys))
        )

    def _weights(self, data: DataProto, keys: Sequence[str]) -> dict[str, torch.Tensor]:
        """The weights that `losses.session_loss` reads: those of the policy term, and of those next to it."""
        actor, mask = self.config.actor_rollout_ref.actor, data.batch["response_mask"].float()
        sampled, kept = (data.batch[name].sum(dim=-1).tolist() for name in ("loss_mask", "response_mask"))
        out = {}
        policy = row_weights(MEANS.get(actor.policy_loss.loss_mode, actor.loss_agg_mode), keys, sampled, kept)
        if policy is not None:
            before = data.batch.get("rollout_is_weights", torch.ones_like(mask))
            out["rollout_is_weights"] = before * torch.from_numpy(policy).unsqueeze(-1)
        others = row_weights(actor.loss_agg_mode, keys, sampled, kept)
        if others is not None:
            out["row_weights"] = torch.from_numpy(others).unsqueeze(-1).expand_as(mask)
        return out
