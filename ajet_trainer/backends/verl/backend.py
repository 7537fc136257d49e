"""verl as a backend: configuration, Ray, TransferQueue and verl's trainer, for the length of a run."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.address import is_here
from ajet_sdk.settings import ConfigError
from ajet_trainer.backends.verl import ADDRESS, VENDOR
from ajet_trainer.backends.verl.checkpoints import must_fit, prune, repair_marker, set_aside, whole
from ajet_trainer.config import DEVICE, Config
from ajet_trainer.engines.attached import Attached
from ajet_trainer.learner import Learner
from ajet_trainer.progress import Progress

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Verl:
    """See `ajet_trainer.backends.Backend`."""

    log = "verl.log"

    @contextmanager
    def open(
        self, config: Config, engines: Attached | None, progress: Progress, signals: Callable[[], None]
    ) -> Iterator[Learner]:
        progress.phase("importing verl")
        device = choose_device(config.verl.get(DEVICE))
        env = environment(device, progress.run_dir)
        os.environ.update(env)
        from ajet_trainer.backends.verl import settings
        from ajet_trainer.backends.verl.cluster import cluster, note_processes
        from ajet_trainer.backends.verl.learner import VerlLearner
        from ajet_trainer.backends.verl.trainer import AjetTrainer

        folder = settings.checkpoints(config)
        resumed = repair_marker(folder)
        prune(folder, config.keep_checkpoints)
        config, tree, why = settings.decided(
            config, device, engines.folder if engines else None, apart=engines is not None and engines.apart
        )
        if resumed is not None:
            must_fit(folder / f"global_step_{resumed}", tree.trainer.nnodes * tree.trainer.n_gpus_per_node)
        late = listens(config.proxy_url, tree) | ({"VERL_ENGINE_VENDOR": VENDOR} if config.rows == "tree" else {})
        os.environ.update(late)
        env |= late
        progress.say(f"rows = {config.rows}" + (f": {why}" if why else ""))
        if engines is None:
            register_replica(device)
        else:
            settings.sent_in(tree, engines.dtype())
        progress.phase("starting Ray and TransferQueue")
        with cluster(tree, device, env, progress.run_dir):
            signals()
            learner = VerlLearner(AjetTrainer(tree, config, hybrid=engines is None), engines, progress.say)
            progress.phase("loading the model and launching vLLM" if engines is None else "loading the model")
            learner.begin()
            note_processes(progress.run_dir)
            try:
                yield learner
            finally:
                learner.finish()

    def export(self, run_dir: Path, step: int | None, folder: Path, say: Callable[[str], None]) -> None:
        from ajet_trainer.backends.verl.export import export

        export(run_dir, step, folder, say)

    def set_aside(self, run_dir: Path, step: int, place: Path) -> list[int]:
        return set_aside(run_dir / "checkpoints", step, place)

    def tokenizers(self, run_dir: Path) -> Sequence[Path]:
        checkpoints = run_dir / "checkpoints"
        steps = reversed(whole(checkpoints))
        return [checkpoints / f"global_step_{step}" / "actor" / "huggingface" for step in steps]


def choose_device(wanted: str | None) -> str:
    """``cpu`` or ``cuda``; where nothing is `wanted`, GPUs if there are any. Raises `ConfigError` for missing GPUs."""
    import torch

    found = torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise ConfigError(f"{DEVICE} = 'cuda': torch finds no GPU here", param=DEVICE)
    return "cuda" if found and wanted != "cpu" else "cpu"


def environment(device: str, run_dir: Path) -> dict[str, str]:
    """Variables for every process of the run, this one included, set before torch or verl are imported. What is set
    already stays as it is."""
    values = {
        "TRANSFER_QUEUE_ENABLE": "1",
        "VERL_LOGGING_LEVEL": "WARN",
        "TQ_LOGGING_LEVEL": "WARN",
        "VLLM_LOGGING_LEVEL": "WARN",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",  # these would lack the run's environment, and never be used
        "TOKENIZERS_PARALLELISM": "false",
        "TENSORBOARD_DIR": str(run_dir.absolute() / "tensorboard"),  # verl's logger would take the working folder
        "TQ_NUM_THREADS": str(min(8, os.cpu_count() or 1)),
        "VERL_AJET_RUN": uuid.uuid4().hex[:12],
    }
    if device == "cpu":
        values |= {
            "VERL_PLATFORM": "cpu",
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "RAY_worker_niceness": "0",  # Ray's 15 lets agents on the same cores starve trainer and engine
        }
    return {name: os.environ.get(name, value) for name, value in values.items()}


def listens(proxy_url: str, tree: DictConfig) -> dict[str, str]:
    """The variable by which engines listen on the loopback address alone, if they and the proxy are on this host. What
    it says already stays as it is."""
    joined = os.environ.get("RAY_ADDRESS") or tree.ray_kwargs.ray_init.get("address", "local") != "local"
    said = os.environ.get(ADDRESS, "127.0.0.1" if is_here(proxy_url) and not joined else "")
    return {ADDRESS: said} if said else {}


def register_replica(device: str) -> None:
    """Has verl launch a vLLM replica of ours, through its own registry."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    ours, name = "ajet_trainer.backends.verl.vllm_replica", "CpuReplica" if device == "cpu" else "RunReplica"
    RolloutReplicaRegistry.register("vllm", lambda: getattr(import_module(ours), name))
