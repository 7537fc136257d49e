"""Puts a run together: configuration, Ray, verl's trainer, the links to the proxies; and takes it apart again.

A first SIGTERM or SIGINT lets the step in progress finish, saves and acknowledges it, and ends with status 0. A second
one, or a first one while the parts are still starting, ends at once. Either way untrained batches go back to the proxy,
the gate opens, and Ray, the workers and vLLM end before this process does.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ajet_sdk.errors import AjetError
from ajet_sdk.settings import ConfigError
from ajet_trainer import same_model
from ajet_trainer.config import DEVICE, Config, digest
from ajet_trainer.forest import VENDOR
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link
from ajet_trainer.presence import Presence, trainer_of
from ajet_trainer.progress import Progress
from ajet_trainer.step import Run
from ajet_trainer.trained_batches import TrainedBatches


class Stop:
    """What the signals have asked for. Until `graceful` is set, a signal raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        self.requested = False
        self.graceful = False

    def install(self) -> None:
        """Ray replaces handlers when it starts, so this is called again after that."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.graceful:
            raise KeyboardInterrupt
        self.requested = True


class TrainingFailed(AjetError):
    """Something in the engines failed; the message is one line, the whole story is in `verl.log` of the run folder."""

    type = "training_failed"


Live = Callable[[Config], Config]
"""The configuration in force as it is now, of what it was."""


def run(config: Config, say: Callable[[str], None], live: Live = lambda config: config) -> None:
    """Trains until the planned number of steps or a signal. What goes wrong is raised as an `AjetError`.

    verl, Ray and vLLM write what they have to say into ``verl.log`` of the run folder.
    """
    stop = Stop()
    stop.install()
    log = Path(config.run_dir) / "verl.log"
    try:
        progress = Progress(config.run_dir, config.total_steps, say, digest(config))
        held = hold(progress.run_dir)
        opened = log.open("a", buffering=1)
    except BlockingIOError:
        raise ConfigError(f"another trainer is at work in run_dir {config.run_dir!r}", param="run_dir") from None
    except OSError as error:
        raise ConfigError(f"run_dir {config.run_dir!r} cannot be written to: {error}", param="run_dir") from error
    with held, opened as file, redirect_stdout(file), redirect_stderr(file):
        try:
            assemble(config, progress, stop, live)
        except AjetError:
            progress.phase("failed", quiet=True)
            raise
        except KeyboardInterrupt:
            progress.phase("stopped", quiet=True)
            raise
        except Exception as error:
            progress.phase("failed", quiet=True)
            traceback.print_exc(file=file)
            raise TrainingFailed(f"{first_words(error)} (more in {log})") from error


def hold(run_dir: Path) -> IO[str]:
    """A lock on `run_dir` for as long as the returned file is open; `BlockingIOError` if another process has it. It is
    a record lock, since children that outlive a killed run must not have it. File systems without locks go without."""
    file = (run_dir / "lock").open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise BlockingIOError(error.errno, "locked") from None
    return file


def first_words(error: Exception) -> str:
    """What an error says in one line: its first line, and the next if the first only announces it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def assemble(config: Config, progress: Progress, stop: Stop, live: Live = lambda config: config) -> None:
    """Brings everything up in order, trains, and takes it down in the opposite order. The proxy is asked first: a wrong
    address or key shows before a minute is spent on loading."""
    progress.phase("looking for the proxy")
    with closing(Link.of(config, trainer=trainer_of(config))) as link:
        link.meet()
        with Presence(link):
            bring_up(config, link, progress, stop, live)


def bring_up(config: Config, link: Link, progress: Progress, stop: Stop, live: Live) -> None:
    """Everything behind the link, and then the run."""
    same_model.look(config, {})
    progress.phase("importing verl")
    device = choose_device(config.verl.get(DEVICE))
    env = environment(device, progress.run_dir)
    if config.rows == "tree":
        env["VERL_ENGINE_VENDOR"] = VENDOR
    os.environ.update(env)
    from ajet_trainer.backends.verl import adapters, settings
    from ajet_trainer.backends.verl.checkpoints import prune, repair_marker
    from ajet_trainer.backends.verl.cluster import cluster, note_processes
    from ajet_trainer.backends.verl.trainer import AjetTrainer

    repair_marker(settings.checkpoints(config))
    prune(settings.checkpoints(config), config.keep_checkpoints)
    apart = adapters.apart(config)
    with weights_folder(config, apart=apart) as folder:
        tree = settings.compose(config, device, folder, apart=apart)
        register_replica(device, folder)
        progress.phase("starting Ray and TransferQueue")
        with cluster(tree, device, env, progress.run_dir):
            stop.install()
            trainer = AjetTrainer(tree, config, folder, progress.say)
            progress.phase("loading the model and launching vLLM" if folder is None else "loading the model")
            trainer.init()
            note_processes(progress.run_dir)
            try:
                serve(config, link, trainer, progress, stop, live)
            finally:
                trainer.finish()


def serve(config: Config, link: Link, trainer: Any, progress: Progress, stop: Stop, live: Live) -> None:
    """The run itself, with everything up."""
    trainer.permit = link.check
    with Keeper(link) as keeper:
        batches = TrainedBatches.from_state(trainer.batches)
        training = Run(config, link, trainer, batches, keeper, progress, stopping=lambda: stop.requested, live=live)
        try:
            training.start()
            progress.phase(f"training from step {trainer.version}")
            stop.graceful = True
            training.loop()
            progress.phase("stopped" if stop.requested else "done")
        finally:
            training.close()


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


def register_replica(device: str, folder: Path | None) -> None:
    """In hybrid placement verl's vLLM replica is ours, through verl's own registry."""
    if folder is None:
        from verl.workers.rollout.replica import RolloutReplicaRegistry

        ours, name = "ajet_trainer.backends.verl.vllm_replica", "CpuReplica" if device == "cpu" else "RunReplica"
        RolloutReplicaRegistry.register("vllm", lambda: getattr(import_module(ours), name))


@contextmanager
def weights_folder(config: Config, *, apart: bool = False) -> Iterator[Path | None]:
    """Where weights travel to engines that stand alone; None where verl launches them. The folder is this run's own and
    is removed with it. What a killed run left is removed by the next. But that of an adapter `apart` stays, because
    engines may read it again."""
    if not config.attached:
        yield None
        return
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    parent = Path(config.weights_dir or shared).absolute()
    run = f"{platform.node()}:{Path(config.run_dir).absolute()}"
    word = hashlib.sha256(run.encode()).hexdigest()[:16]
    if apart:
        own = Path(config.run_dir).absolute() / "adapters"
        folder = parent / f"ajet-adapters-{word}" if config.weights_dir else own
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    name = f"ajet-weights-{word}"
    for left in parent.glob(f"{name}*"):
        shutil.rmtree(left, ignore_errors=True)
    if config.weights_dir:
        folder = parent / name
        folder.mkdir(parents=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
