"""verl as a `Learner`: it is given rows and a version, and makes them a step, a checkpoint, or weights in engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import transfer_queue as tq
from verl.utils.debug import marked_timer

from ajet_sdk.errors import AjetError
from ajet_sdk.runs import LEARNING_RATE
from ajet_sdk.settings import ConfigError
from ajet_trainer import agreement, trained_rows
from ajet_trainer.attempts import NoUpdate
from ajet_trainer.backends.verl import compared, settings, weights
from ajet_trainer.backends.verl.checkpoints import DTYPE, prune
from ajet_trainer.backends.verl.estimators import COMPARING
from ajet_trainer.backends.verl.loggers import Loggers
from ajet_trainer.backends.verl.rows import put_rows, trained
from ajet_trainer.backends.verl.trainer import AjetTrainer
from ajet_trainer.batch import Row
from ajet_trainer.config import MINI_BATCH, Config
from ajet_trainer.engines import EngineLost
from ajet_trainer.engines.attached import Attached
from ajet_trainer.engines.weights import dead_engine
from ajet_trainer.run_folder import sync
from ajet_trainer.sampling import Rule

MANY = ("fsdp", "fsdp2", "megatron", "veomni")
"""Engines of verl that take a temperature for each row. Their fused kernels take one for all."""


class VerlLearner:
    """verl's `trainer`, with the `engines` that stand alone, or with those that verl launches. `begin` must have run
    before anything else. `say` shows a line."""

    def __init__(self, trainer: AjetTrainer, engines: Attached | None, say: Callable[[str], None]) -> None:
        self.colocated = engines is None
        self._verl, self._engines, self._say = trainer, engines, say
        self._proposed: int | None = None
        """The version that the candidate's engines were given last."""
        self._rate = float(trainer.config.actor_rollout_ref.actor.optim.lr)
        self._loggers = Loggers(trainer.config, say)

    def begin(self) -> None:
        """Loads the model, and has engines of verl's own serve it. Raises `ConfigError` if it cannot be trained."""
        self._verl.init()
        self._look()
        if self.colocated:
            self.push()

    @property
    def version(self) -> int:
        return int(self._verl.global_steps)

    @property
    def rule(self) -> Rule:
        config, part = self._verl.config, self._verl.config.actor_rollout_ref
        limits = [part.actor.ppo_max_token_len_per_gpu]
        limits += [one.log_prob_max_token_len_per_gpu for one in (part.rollout, part.ref)]
        if self._verl.use_critic:
            limits.append(config.critic.ppo_infer_max_token_len_per_gpu)
        return Rule(
            temperature=float(part.rollout.temperature),
            several=part.actor.strategy in MANY and not part.model.use_fused_kernels,
            max_tokens=int(min(limits)), vocabulary=self._verl.vocabulary,
            by_turn=settings.by_turn(self._verl.ours, config), shaping=settings.shaping(config),
            compares=config.algorithm.adv_estimator in COMPARING,
        )  # fmt: skip

    @property
    def batches(self) -> Mapping[str, Any]:
        """The trained batches of the checkpoint that this trainer started from; empty for a new run."""
        batches: Mapping[str, Any] = self._verl.train_dataloader.batches
        return batches

    def upstreams(self) -> Sequence[str] | None:
        if not self.colocated:
            return None
        return tuple(f"http://{address}" for address in self._verl.llm_server_manager.get_addresses())

    def check(self) -> None:
        if self._engines is None:
            if dead := dead_engine(self.upstreams() or ()):
                raise EngineLost(dead)
        elif self._engines.check():
            self.compare()

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        """One training step of verl on `rows`. Metrics under verl's own names, phases as ``timing_s/NAME``."""
        verl, metrics = self._verl, dict[str, Any]()
        verl.begin(rows)
        with marked_timer("step", verl.timing_raw):
            with marked_timer("put", verl.timing_raw):
                put_rows(rows, self.version, float(verl.config.actor_rollout_ref.rollout.temperature))
            batch = verl.step(metrics, verl.timing_raw)
            made, skipped = verl.updates_of(metrics)
            if made:
                with marked_timer("rows", verl.timing_raw):
                    self._keep(rows, batch.partition_id)
        if made:
            verl._compute_metrics(batch, metrics, verl.timing_raw, global_steps=self.version, epoch=0)
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        if not made:
            verl.global_steps -= 1
            raise NoUpdate(f"the gradient is not finite in any of {skipped} updates")
        return plain(metrics) | {"updates": made, "skipped_updates": skipped}

    def tune(self, config: Config) -> None:
        """A checkpoint holds the learning rate that it was made under, so the rate is set at the start too. What was
        decided of `rows` stays."""
        verl, rate = self._verl, self._rate
        if config.verl.get(LEARNING_RATE) != verl.ours.verl.get(LEARNING_RATE):
            rate = settings.rate(config)
        if not all(verl.actor_rollout_wg.set_learning_rate(rate)) and rate != self._rate:
            raise ConfigError(f"{LEARNING_RATE} takes a restart with this strategy", param=LEARNING_RATE)
        if type(size := config.verl.get(MINI_BATCH, config.groups)) is int:  # and not ${another key}, as it was read
            verl.updates = config.groups // size
        verl.ours, self._rate = replace(config, rows=verl.ours.rows), rate

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._loggers.log(figures, step)

    def finish(self) -> None:
        """Loggers write what they still hold."""
        self._loggers.finish()

    def save(self, batches: Mapping[str, Any]) -> None:
        """Saves verl's checkpoint with `batches` in it, then removes old ones but for those that stay. verl writes its
        latest-checkpoint marker last. All is on disk before anybody is told that the batches are trained."""
        verl = self._verl
        verl.train_dataloader.batches = {**batches, DTYPE: verl.dtype}
        verl._save_checkpoint()
        folder = Path(verl.config.trainer.default_local_dir)
        sync(folder)
        prune(folder, verl.ours.keep_checkpoints)

    def push(self) -> None:
        with reaching("the new weights did not reach the engines"):
            if self._engines is None:
                self._send("naive")
            elif self._engines.push(self.version, self._write):
                self.compare()

    def propose(self) -> None:
        engines = self._engines and self._engines.candidate
        assert engines is not None
        if self._proposed == self.version:
            engines.check()
            return
        with reaching("the candidate did not reach its engines"):
            engines.push(self.version, self._write_beside)
        self._proposed = self.version

    def _write_beside(self, folder: Path) -> None:
        """The same as `_write` for the candidate. verl knows one folder for whole weights."""
        self._write(folder)
        if self._engines is not None and not self._engines.apart:
            folder.parent.mkdir(exist_ok=True)  # which a push of weights that serve has removed
            shutil.rmtree(folder, ignore_errors=True)
            (self._engines.folder / folder.name).replace(folder)

    def _write(self, folder: Path) -> None:
        """Has verl's workers write what engines that stand alone are sent. Of a whole model, `weights.SharedFolder`
        knows the folder."""
        if self._engines is not None and self._engines.apart:
            weights.wait(self._verl.actor_rollout_wg.write_adapter(str(folder)), lambda: None)
        else:
            self._send("auto")

    def _send(self, mode: str) -> None:
        launched = self.upstreams() or ()
        references = self._verl.actor_rollout_wg.update_weights(global_steps=self.version, mode=mode)
        weights.wait(references, lambda: dead_engine(launched))

    def compare(self) -> None:
        """An engine of ours gives up its devices meanwhile, as in a step."""
        verl, ours = self._verl, self._verl.ours
        urls, key = self.upstreams() or ours.engine_urls, "" if self.colocated else ours.engine_key
        prompt = verl.tokenizer.encode(agreement.PROMPT)
        found = agreement.answers(urls, ours.model_name, prompt, key)
        if self.colocated:
            verl.on_sample_end()
        computed = verl.actor_rollout_wg.logprobs_of([(prompt, answer.ids) for answer in found])
        if self.colocated:
            self.push()
        rollout = verl.config.actor_rollout_ref.rollout
        served = str(rollout.get("quantization") or rollout.dtype) if self.colocated else None
        for url, answer, own in zip(urls, found, next(one for one in computed if one is not None), strict=True):
            agreement.check(url, answer, own, served, compared.dtype_of(verl.config))

    def _keep(self, rows: Sequence[Row], partition: str) -> None:
        """Writes what the step knows of its rows into a file for reading. The step has worked, even if that fails."""
        ours = self._verl.ours
        try:
            trained_rows.write(Path(ours.run_dir), self.version, trained(rows, partition), ours.model)
        except Exception as error:
            said = str(error) or type(error).__name__
            self._say(f"the rows of step {self.version} are not kept for reading: {said}")

    def _look(self) -> None:
        """Has every model compute rows next to others, with the positions that engines have. Raises `ConfigError` if
        that is no fit base for training. It is asked twice: kernels may be chosen while they run for the first time."""
        groups = {id(one): one for name in ("actor_rollout_wg", "ref_policy_wg", "critic_wg")
                  if (one := getattr(self._verl, name, None)) is not None}  # fmt: skip
        served = self._served()
        for group in groups.values():
            if any(group.wrong(served)) and (said := next(filter(None, group.wrong(served)), "")):
                raise ConfigError(f"model = {self._verl.ours.model!r} cannot be trained here: {said}", param="model")

    def _served(self) -> int:
        """The tokens of the longest row that engines serve. Those that stand alone are asked if it matters."""
        if self._engines is None or not self._verl.trained_at:
            return int(self._verl.config.actor_rollout_ref.rollout.max_model_len)
        return self._engines.longest(self._verl.trained_at)


@contextmanager
def reaching(failed: str) -> Iterator[None]:
    """Raises `EngineLost`, which says that it `failed`, for an error that has no words of ours."""
    try:
        yield
    except (AjetError, EngineLost):
        raise
    except Exception as error:
        raise EngineLost(f"{failed}: {error}") from error


def plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    """verl's metrics as floats; what is no single number is left out."""
    out = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, RuntimeError):
            out[name] = float(value)
    return out
