"""verl's V1 `PPOTrainer`, fed by leases instead of a dataset: the end of the line, where samples become a gradient.

What is verl's stays verl's: workers, engines, advantages, losses, rollout correction, checkpoints, metrics. This class
says where the data comes from: rows that `ajet_trainer.step` hands over, put into TransferQueue as finished sessions.
In a checkpoint the trained batches stand in for a dataset, so that they are saved and restored with the weights. This
class also says how weights reach the engine, and what one episode weighs when it came apart into several rows.

Invariant: a step trains exactly the rows it was given, however many rows the episodes split into. It makes
``groups / ppo_mini_batch_size`` optimizer updates, each on whole groups; fewer where it was given fewer groups.

Next: the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
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
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_to_nested

from ajet_sdk.errors import AjetError
from ajet_sdk.runs import LEARNING_RATE
from ajet_sdk.settings import ConfigError
from ajet_trainer import same_model, trained_rows
from ajet_trainer.advantage import group_of, row_weights
from ajet_trainer.agreement import ENOUGH, OtherWeights, fresh_kl
from ajet_trainer.attempts import NoUpdate
from ajet_trainer.backends.verl import adapters, advantages, compared, settings, weights
from ajet_trainer.backends.verl.checkpoints import DTYPE, prune
from ajet_trainer.backends.verl.corrections import READ, by_call, figures, left_out, over_sequences
from ajet_trainer.backends.verl.estimators import BY_TURN, COMPARING, GROUPED, by_turn
from ajet_trainer.backends.verl.loggers import Loggers
from ajet_trainer.backends.verl.losses import session_loss
from ajet_trainer.backends.verl.positions import trained_at
from ajet_trainer.backends.verl.worker import ROW_TEMPERATURE
from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.engines import EngineLost, length_of
from ajet_trainer.overlong import Shaping
from ajet_trainer.turns import ByTurn
from ajet_trainer.updates import deal, together

PARTITION = "train"
MANY = ("fsdp", "fsdp2", "megatron", "veomni")
"""Engines of verl that take a temperature for each row. Their fused kernels take one for all."""

MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"

OF_TURNS = "turn_advantages"
"""Where rows have the advantages of their tokens, if they bring them along."""

KEPT = ("response_mask", "old_log_probs", "advantages", "rollout_is_weights")
"""What of a row is kept for reading, in the order of `TrainedRow`. The last one is not always there."""

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


@register_trainer("ajet")
class AjetTrainer(PPOTrainer):  # type: ignore[misc]
    """A `Learner` (see `ajet_trainer.step`) made of verl's trainer. `init` must have run before anything else.
    `say` shows a line."""

    def __init__(self, config: DictConfig, ours: Config, folder: Path | None, say: Callable[[str], None]) -> None:
        self._enable_hybrid_replicas = folder is None
        super().__init__(config)
        self.trainer_mode = "sync"  # nothing in TransferQueue outlives a step, so checkpoints need not hold it
        self.colocated = folder is None
        self._ours, self._folder = ours, folder
        self._apart = not config.actor_rollout_ref.model.lora.merge
        self._adapter: Path | None = None
        self._pushed: tuple[Path, int] | None = None
        self._engines: dict[str, same_model.Served] = {}
        self._rate = float(config.actor_rollout_ref.actor.optim.lr)
        self._updates = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        self._loggers, self._say = Loggers(config, say), say
        self.permit: Callable[[], None] = lambda: None
        """Raises if engines may have no more of our weights."""

    # What verl asks of a trainer -----------------------------------------------------------------------------------

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        self._vocabulary = getattr(model.hf_config.get_text_config(), "vocab_size", None)
        dtype = getattr(model.hf_config, "dtype", None)
        self._dtype = dtype and str(dtype).removeprefix("torch.")
        self._trained_at = trained_at(model.hf_config.get_text_config())

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
        self._look()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(partial(session_loss, config=actor))
        if self.colocated:
            self.push()

    def on_sample_end(self) -> None:
        self.checkpoint_manager.sleep_replicas()

    def on_step_end(self) -> None:
        self.push()

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
            if self._ours.rows == "tree":
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
        most = self._ours.max_kl
        if tokens >= ENOUGH and most and not kl <= most:
            raise OtherWeights(
                f"the engine does not serve the weights that this step begins with, or agents sample otherwise than "
                f"they tell: over {tokens} tokens of these weights its KL divergence from the trainer is {kl:.2f} nats "
                f"(max_kl = {most:g}). Nothing was trained of them"
            )

    # What a run asks of a learner (ajet_trainer.step) --------------------------------------------------------------

    @property
    def version(self) -> int:
        return int(self.global_steps)

    @property
    def max_tokens(self) -> int:
        actor, limits = self.config.actor_rollout_ref.actor, [int(1e9)]
        if actor.use_dynamic_bsz:
            limits.append(int(actor.ppo_max_token_len_per_gpu))
        if self.use_critic:
            limits.append(int(self.config.critic.ppo_infer_max_token_len_per_gpu))
        return min(limits)

    @property
    def vocabulary(self) -> int | None:
        return self._vocabulary

    @property
    def temperature(self) -> float:
        return float(self.config.actor_rollout_ref.rollout.temperature)

    @property
    def several_temperatures(self) -> bool:
        model, actor = self.config.actor_rollout_ref.model, self.config.actor_rollout_ref.actor
        return actor.strategy in MANY and not model.use_fused_kernels

    @property
    def by_turn(self) -> ByTurn | None:
        return settings.by_turn(self._ours, self.config)

    @property
    def shaping(self) -> Shaping | None:
        return settings.shaping(self.config)

    @property
    def compares(self) -> bool:
        return self.config.algorithm.adv_estimator in COMPARING

    @property
    def batches(self) -> Mapping[str, Any]:
        """What the checkpoint that this trainer started from holds; empty for a new run."""
        batches: Mapping[str, Any] = self.train_dataloader.batches
        return batches

    def upstreams(self) -> Sequence[str] | None:
        if not self.colocated:
            return None
        return tuple(f"http://{address}" for address in self.llm_server_manager.get_addresses())

    def check(self) -> None:
        dead = weights.dead_engine(self.upstreams() or self._ours.engine_urls)
        if dead is not None:
            raise EngineLost(dead)
        if not self.colocated:
            self._give_again()
        if self._adapter is not None:
            ours = self._ours
            for url in adapters.heal(ours.engine_urls, ours.model_name, self._adapter, ours.engine_key):
                self._say(f"the engine at {url} had lost its adapter, and has it again")

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        """One training step of verl on `rows`. Metrics under verl's own names, phases as ``timing_s/NAME``."""
        self._rows, self._began = rows, self.version
        self.global_steps += 1
        metrics: dict[str, Any] = {}
        self.timing_raw: dict[str, float] = {}
        self._fit_to(rows)
        self._rewards = {row.key: row.reward for row in rows}
        with marked_timer("step", self.timing_raw):
            with marked_timer("put", self.timing_raw):
                put_rows(rows, self.global_steps, self.temperature)
            batch = self.step(metrics, self.timing_raw)
            made, skipped = self._updates_of(metrics)
            if made:
                with marked_timer("rows", self.timing_raw):
                    self._keep(rows, batch.partition_id)
        if made:
            self._compute_metrics(batch, metrics, self.timing_raw, global_steps=self.global_steps, epoch=0)
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        if not made:
            self.global_steps -= 1
            raise NoUpdate(f"the gradient is not finite in any of {skipped} updates")
        return plain(metrics) | {"updates": made, "skipped_updates": skipped}

    def tune(self, config: Config) -> None:
        """A checkpoint holds the learning rate that it was made under, so the rate is set at the start too."""
        rate, before = self._rate, self._ours
        if config.verl.get(LEARNING_RATE) != before.verl.get(LEARNING_RATE):
            rate = settings.rate(config)
        size = config.verl.get(MINI_BATCH)
        if size is not None and config.groups % size:
            raise ConfigError(f"{MINI_BATCH} = {size} does not divide {config.groups} groups", param="groups")
        if not all(self.actor_rollout_wg.set_learning_rate(rate)) and rate != self._rate:
            raise ConfigError(f"{LEARNING_RATE} takes a restart with this strategy", param=LEARNING_RATE)
        self._updates = 1 if size is None else config.groups // size
        self._ours, self._rate = config, rate

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._loggers.log(figures, step)

    def finish(self) -> None:
        """Loggers write what they still hold."""
        self._loggers.finish()

    def save(self, batches: Mapping[str, Any]) -> None:
        """Saves verl's checkpoint with `batches` in it, then removes old ones but for those that stay. verl writes its
        latest-checkpoint marker last."""
        self.train_dataloader.batches = {**batches, DTYPE: self._dtype}
        self._save_checkpoint()
        prune(Path(self.config.trainer.default_local_dir), self._ours.keep_checkpoints)

    def push(self) -> None:
        try:
            again = self._started_again()
            self._push()
            if again:
                self.compare()
        except (AjetError, EngineLost):
            raise
        except Exception as error:
            raise EngineLost(f"the new weights did not reach the engines: {error}") from error

    def _started_again(self) -> list[str]:
        """The engines of others that were started again since they were last given weights. Raises `EngineLost` for one
        of another model."""
        found = {} if self.colocated else same_model.look(self._ours, self._engines)
        again = [url for url, now in found.items() if same_model.started_again(self._engines.get(url), now)]
        self._engines |= found
        return again

    def _give_again(self) -> None:
        """Engines that were started again serve the weights that they began with, until they have the last ones."""
        again = self._started_again()
        if again and self._pushed is not None:
            folder, version = self._pushed
            self.permit()
            weights.load_into(again, folder, version, key=self._ours.engine_key)
            self._engines = same_model.look(self._ours, self._engines)
            self.compare()
            self._say(f"{' and '.join(again)} had been started again, and has the weights again")

    def compare(self) -> None:
        """An engine of ours gives up its devices meanwhile, as in a step."""
        ours, told = self._ours, self.upstreams()
        urls = ours.engine_urls if told is None else told
        prompt = self.tokenizer.encode(compared.PROMPT)
        answers = compared.answers(urls, ours.model_name, prompt, ours.engine_key if told is None else "")
        if self.colocated:
            self.on_sample_end()
        computed = self.actor_rollout_wg.logprobs_of([(prompt, answer.ids) for answer in answers])
        if self.colocated:
            self.push()
        served = None if told is None else compared.dtype_of_launched(self.config)
        for url, answer, own in zip(urls, answers, next(one for one in computed if one is not None), strict=True):
            compared.check(url, answer, own, served, compared.dtype_of(self.config))

    def _push(self) -> None:
        if self._apart:
            self._push_adapter()
            return
        launched = self.upstreams() or ()
        mode = "naive" if self.colocated else "auto"
        references = self.actor_rollout_wg.update_weights(global_steps=self.global_steps, mode=mode)
        weights.wait(references, lambda: weights.dead_engine(launched))
        if self._folder is not None:
            folder, key = self._folder / str(self.global_steps), self._ours.engine_key
            self.permit()
            weights.load_into(self._ours.engine_urls, folder, self.version, key=key)
            weights.forget(self._folder, self.global_steps)
            self._pushed = folder, self.version
            self._engines = same_model.look(self._ours, self._engines)

    def _push_adapter(self) -> None:
        assert self._folder is not None
        written = adapters.begin(self._folder, self.version)
        weights.wait(self.actor_rollout_wg.write_adapter(str(written)), lambda: None)
        self._adapter = adapters.finish(written)
        key = self._ours.engine_key
        self.permit()
        adapters.load_into(self._ours.engine_urls, self._ours.model_name, self._adapter, key=key)
        adapters.forget(self._adapter)

    def _keep(self, rows: Sequence[Row], partition: str) -> None:
        """Writes what the step knows of its rows into a file for reading. The step has worked, even if that fails."""
        try:
            stored = tq.kv_batch_get(keys=[row.key for row in rows], partition_id=partition, select_fields=list(KEPT))
            trained_rows.write(Path(self._ours.run_dir), self.global_steps, trained(rows, stored), self._ours.model)
        except Exception as error:
            said = str(error) or type(error).__name__
            self._say(f"the rows of step {self.global_steps} are not kept for reading: {said}")

    # Helpers -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Has every model compute rows next to others, with the positions that engines have. Raises `ConfigError` if
        that is no fit base for training. It is asked twice: kernels may be chosen while they run for the first time."""
        groups = {id(one): one for name in ("actor_rollout_wg", "ref_policy_wg", "critic_wg")
                  if (one := getattr(self, name, None)) is not None}  # fmt: skip
        served = self._served()
        for group in groups.values():
            if any(group.wrong(served)) and (said := next(filter(None, group.wrong(served)), "")):
                raise ConfigError(f"model = {self._ours.model!r} cannot be trained here: {said}", param="model")

    def _served(self) -> int:
        """How long rows may be that engines serve. Those that stand alone are asked where it changes positions."""
        if self.colocated or not self._trained_at:
            return int(self.config.actor_rollout_ref.rollout.max_model_len)
        limits = {url: length_of(url, self._ours.engine_key) for url in self._ours.engine_urls}
        if len({limit > self._trained_at for limit in limits.values()}) > 1:
            said = f"serve rows of up to {limits}, on both sides of {self._trained_at}, where positions change"
            raise ConfigError(f"engine_urls {said}: start them with one --max-model-len", param="engine_urls")
        return max(limits.values())

    def _fit_to(self, rows: Sequence[Row]) -> None:
        """Sizes the step for `rows`: verl counts mini-batches in rows, we count them in groups. verl fills up with
        masked rows, which are a group by themselves. Pass@k takes no group of one, so there is none then."""
        lonely = self.config.algorithm.adv_estimator != "grpo_passk"
        self._dealt = deal([row.group for row in rows], self._updates, self._processes, lonely=lonely)
        with open_dict(self.config):
            self.config.data.train_batch_size = len({row.group for row in rows})
            self.config.actor_rollout_ref.actor.ppo_mini_batch_size = self._dealt.rows
            self.config.critic.ppo_mini_batch_size = self._dealt.rows

    def _updates_of(self, metrics: dict[str, Any]) -> tuple[int, int]:
        """How many optimizer updates the step has made, and how many it has left out; a critic's count too."""
        made = planned = 0
        for part, settings_of in (("actor", self.config.actor_rollout_ref.actor), ("critic", self.config.critic)):
            if (share := metrics.pop(f"{part}/updates", None)) is not None:
                mine = self._dealt.updates * settings_of.ppo_epochs
                made, planned = made + round(float(share) * mine), planned + mine
        return made, planned - made

    @property
    def _processes(self) -> int:
        """How many processes share a batch, which verl asks its workers once."""
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
        compared = data
        if over_sequences(algorithm.rollout_correction):  # advantages are those before a rejection
            compared = DataProto(batch=data.batch.clone(False), non_tensor_batch={"uid": groups})
            compared.batch["response_mask"] = data.batch["loss_mask"]
        if algorithm.adv_estimator in GROUPED:
            keys = [batch.keys[place] for place in real]
            rewards = [self._rewards[key] for key in keys]
            for name, values in advantages.by_session(compared.select_idxs(real), keys, rewards, algorithm).items():
                found[name] = torch.zeros_like(found[name])
                found[name][real] = values
        elif algorithm.adv_estimator in advantages.BY_TOKEN:
            rewards = [self._rewards.get(key, 0.0) for key in batch.keys]
            found |= advantages.by_token(compared, lengths.offsets().diff(), rewards, algorithm)
        elif algorithm.adv_estimator == BY_TURN:
            told, _ = by_turn(data.batch[OF_TURNS], data.batch["response_mask"])
            found = dict.fromkeys(("advantages", "returns", OF_TURNS), told)
        found |= self._weights(data, batch.keys)
        nested = {name: response_to_nested(values, lengths) for name, values in found.items()}
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(nested, batch_size=len(batch.keys))
        )

    def _weights(self, data: DataProto, keys: Sequence[str]) -> dict[str, torch.Tensor]:
        """What `losses.session_loss` reads: the weights of the policy term, and of those next to it."""
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


def put_rows(rows: Sequence[Row], step: int, temperature: float = 1.0) -> None:
    """Rows into TransferQueue: trajectories and groups that are finished, so that verl's sampler takes them at once.
    They have temperatures of their own only if some row's is not the learner's `temperature`."""
    fields = list_of_dict_to_tensordict([row_fields(row) for row in rows])
    if any(row.temperature != temperature for row in rows):
        fields[ROW_TEMPERATURE] = torch.tensor([row.temperature for row in rows])
    tags = [row_tag(row, step) for row in rows]
    tq.kv_batch_put(keys=[row.key for row in rows], fields=fields, tags=tags, partition_id=PARTITION)
    groups = list(dict.fromkeys(row.group for row in rows))
    finished = [{"is_prompt": True, "status": "finished", "global_steps": step} for _ in groups]
    tq.kv_batch_put(keys=groups, tags=finished, partition_id=PARTITION)


def row_fields(row: Row) -> dict[str, Any]:
    """One row as verl's trajectory: 1-D tensors without padding. The reward stands at the response's last token, and
    ``calls`` numbers the call that sampled a token."""
    prompt, response, mask = torch.from_numpy(row.prompt), torch.from_numpy(row.response), torch.from_numpy(row.mask)
    scores = torch.zeros(len(response))
    scores[-1] = row.reward
    calls = torch.zeros(len(response), dtype=torch.int64)
    for number, (_, start, end) in enumerate(row.spans, 1):
        calls[start:end] = number
    told = {} if row.advantages is None else {OF_TURNS: torch.from_numpy(row.advantages)}
    return told | {
        "prompts": prompt,
        "responses": response,
        "input_ids": torch.cat([prompt, response]),
        "position_ids": torch.arange(row.tokens),
        "response_mask": mask,
        "loss_mask": mask,
        "calls": calls,
        "rollout_log_probs": torch.from_numpy(row.logprobs),
        "rm_scores": scores,
        "uid": row.group,
        "multi_modal_inputs": {},
        "extra_fields": {"reward_extra_info": {}},
        "num_turns": row.turns,
        "__num_turns__": row.turns,
    }


def row_tag(row: Row, step: int) -> dict[str, Any]:
    """What verl balances and reports by: lengths in tokens, and the policy versions that generated the row."""
    return {
        "status": "success",
        "prompt_len": len(row.prompt),
        "response_len": len(row.response),
        "seq_len": row.tokens,
        "global_steps": step,
        "min_global_steps": row.min_version,
        "max_global_steps": row.max_version,
    }


def trained(rows: Sequence[Row], stored: TensorDict) -> list[trained_rows.TrainedRow]:
    """`rows` with what TransferQueue has `stored` of each, in the same order: the fields of `KEPT` that there are."""
    known = [name for name in KEPT if name in stored.keys()]  # noqa: SIM118  # a TensorDict says so itself
    values = {name: [one.float().numpy() for one in stored[name].unbind()] for name in known}
    return [
        trained_rows.TrainedRow(row, values["response_mask"][place][: len(row.response)].astype(np.int64), *(
            values[name][place][: len(row.response)] for name in known[1:]
        ))
        for place, row in enumerate(rows)
    ]


def plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    """verl's metrics as floats; what is no single number is left out."""
    out = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, RuntimeError):
            out[name] = float(value)
    return out
