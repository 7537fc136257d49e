"""Ray and TransferQueue for the length of a run, and nothing left behind afterwards.

With ``RAY_ADDRESS`` set the run joins that cluster (several nodes); otherwise it starts Ray on this machine. Every
process below this one is noted in `processes.json` of the run folder with its start time. A normal end stops them all
and looks again; after ``kill -9`` the next start of the same run ends those that are still alive.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf

from ajet_sdk.settings import ConfigError

GRACE_S = 10.0
OBJECT_STORE_BYTES = 300 << 20
"""A CPU host moves its data through TransferQueue; Ray's store holds only actor arguments."""

STARTS, LATE = 4, "timed out during startup"
"""So often Ray is started at most, where it says so of itself."""

STORE = ("TransferQueueController", "transfer_queue")
"""The name and the namespace of TransferQueue in a Ray."""


@contextmanager
def cluster(tree: DictConfig, device: str, env: dict[str, str], run_dir: Path) -> Iterator[None]:
    """Ray and TransferQueue are up inside; every process that they started is gone outside."""
    note = run_dir / "processes.json"
    end_stale(note)
    start_ray(tree, device, env)
    note_processes(run_dir)
    try:
        refuse_another()
        tq.init(tree.transfer_queue)
        yield
    finally:
        below = psutil.Process().children(recursive=True)
        try:
            tq.close()
        finally:
            ray.shutdown()
            end(below)
            note.unlink(missing_ok=True)


def refuse_another() -> None:
    """Raises `ConfigError` if another run is in this Ray. TransferQueue has one store for all of a Ray: each run would
    train rows of the other, and the first one to end would close it."""
    with suppress(ValueError):
        ray.get_actor(*STORE)
        said = "another run is at work in this Ray, and a Ray is for one run: start one more, or wait for its end"
        raise ConfigError(f"RAY_ADDRESS: {said}", param="RAY_ADDRESS")


def start_ray(tree: DictConfig, device: str, env: dict[str, str]) -> None:
    """Joins the cluster at ``RAY_ADDRESS`` or starts one here. verl's ``ray_kwargs.ray_init`` has the last word.

    The dashboard stays off, since a run has its own page and files.
    """
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    runtime_env = get_ppo_ray_runtime_env(tree)
    runtime_env["env_vars"].update(env)
    settings = {"runtime_env": runtime_env, "logging_level": logging.ERROR}
    if not os.environ.get("RAY_ADDRESS"):
        settings["address"] = "local"
        settings["include_dashboard"] = False
        if device == "cpu":
            settings["num_cpus"] = max(16, os.cpu_count() or 1)
            settings["num_gpus"] = tree.trainer.n_gpus_per_node * tree.trainer.nnodes
            settings["object_store_memory"] = OBJECT_STORE_BYTES
    wanted = {k: v for k, v in OmegaConf.to_container(tree.ray_kwargs.ray_init).items() if v is not None}
    runtime_env.update({k: v for k, v in wanted.pop("runtime_env", {}).items() if v is not None})
    come_up({**settings, **wanted})


def come_up(settings: dict[str, Any]) -> None:
    """``ray.init`` with `settings`. Ray waits 30 s for its node, which nobody can change. A busy host takes longer, but
    less with each attempt, since its caches are warm then."""
    for left in reversed(range(STARTS)):
        before = psutil.Process().children(recursive=True)
        try:
            ray.init(**settings)
        except Exception as error:
            if not left or LATE not in str(error):
                raise
            ray.shutdown()
            end([one for one in psutil.Process().children(recursive=True) if one not in before])
        else:
            return


def note_processes(run_dir: Path) -> None:
    """Remembers every process below this one, for a next start after ``kill -9``."""
    below = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            below.append([process.pid, process.create_time()])
    (run_dir / "processes.json").write_text(json.dumps(below))


def end_stale(note: Path) -> None:
    """Ends what a killed run of the same folder left behind: the same pid and the same start time."""
    try:
        entries = json.loads(note.read_text())
    except (OSError, ValueError):
        return
    stale = []
    for pid, created in entries:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if abs(process.create_time() - created) < 1.0:
                stale.append(process)
    end(stale)


def end(processes: list[psutil.Process]) -> None:
    """Waits a moment for `processes`, then asks them to end, then makes them."""
    _, alive = psutil.wait_procs(processes, timeout=1.0)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                ask(process)
        _, alive = psutil.wait_procs(alive, timeout=GRACE_S)
