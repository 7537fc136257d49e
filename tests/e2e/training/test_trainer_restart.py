"""A trainer is killed in the middle of a step, started again, loses its engine, is started again, loses its daemon,
which comes back, and is told to stop."""

from __future__ import annotations

import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.players import Players
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import RATE, TrainerFailed, TrainerProcess, living

GROUPS, SIZE, SAVE_FREQ, LEASE_S = 2, 4, 2, 15.0


def policy_version(proxy: ProxyProcess) -> int:
    return int(proxy.report()["models"]["policy"]["policy_version"])


def trained_by(proxy: ProxyProcess) -> int:
    return int(proxy.report()["episodes"]["trained"])


def steps(trainer: TrainerProcess) -> list[int]:
    return [line["step"] for line in trainer.metrics()]


def batches(trainer: TrainerProcess) -> list[str]:
    return [line["batch"] for line in trainer.metrics()]


def beginnings(trainer: TrainerProcess) -> list[int]:
    """The steps from which each of its lives went on."""
    return [int(step) for step in re.findall(r"training from step (\d+)", trainer.log.read_text())]


def loses_itself(trainer: TrainerProcess) -> None:
    """SIGKILL in the middle of a step; the next life goes on from the last checkpoint and leaves no process behind."""
    trainer.until(lambda: trainer.phase() == "training")
    below = trainer.below()
    trainer.signal(signal.SIGKILL)
    trainer.wait()
    done = batches(trainer)
    trainer.start()
    trainer.until(lambda: len(beginnings(trainer)) == 2)
    resumed = beginnings(trainer)[1]
    assert resumed % SAVE_FREQ == 0 and abs(resumed - len(done)) < SAVE_FREQ
    assert living(below) == []
    trainer.until(lambda: len(steps(trainer)) > resumed + 1)
    kept = min(resumed, len(done))
    assert batches(trainer)[:kept] == done[:kept]


def loses_its_engine(trainer: TrainerProcess, daemon: ProxyProcess) -> None:
    """It says so, opens the gate and ends; the next life trains on."""
    engine = [process for process in trainer.below() if "EngineCore" in " ".join(process.cmdline())]
    engine[0].kill()
    assert trainer.wait() == 1
    assert daemon.report()["models"]["policy"]["gate"] == "open"
    assert "the engine" in trainer.log.read_text()
    reached = max(steps(trainer))
    for _ in range(2):  # as a supervisor would: vLLM on a CPU was seen to die by itself at its start
        trainer.start()
        with suppress(TrainerFailed):
            trainer.until(lambda: max(steps(trainer), default=0) > reached)
            break


def loses_its_daemon(trainer: TrainerProcess, daemon: ProxyProcess) -> None:
    """It waits for longer than a lease, and goes on when the daemon is back with all that it had."""
    trainer.until(lambda: trained_by(daemon) > 0)
    daemon.kill()
    time.sleep(LEASE_S + 1.0)
    daemon.start()
    reached, before = len(steps(trainer)), trained_by(daemon)
    trainer.until(lambda: len(steps(trainer)) > reached + 2 and trained_by(daemon) > before)
    trainer.until(lambda: policy_version(daemon) > reached)


@pytest.mark.slow
def test_a_trainer_and_what_it_needs_may_die_at_any_time(tmp_path: Path) -> None:
    model = build(tmp_path / "tiny")
    with ProxyProcess(None, tmp_path / "data") as daemon:
        ours = {
            "model": model, "proxy_url": daemon.url, "groups": GROUPS, "group_size": SIZE, "save_freq": SAVE_FREQ,
        }  # fmt: skip
        players = Players(daemon.url, model="policy", group_size=SIZE, parallel=GROUPS * SIZE)
        with TrainerProcess(tmp_path, ours, {RATE: 1e-4}, lease_s=LEASE_S) as trainer, players:
            trainer.until(lambda: 3 in steps(trainer))
            loses_itself(trainer)
            loses_its_engine(trainer, daemon)
            last_life = trainer.below()
            loses_its_daemon(trainer, daemon)
            trainer.signal(signal.SIGTERM)
            assert trainer.wait() == 0
            assert living(last_life) == []
        end = daemon.report()

    metrics = trainer.metrics()
    assert steps(trainer) == list(range(1, len(metrics) + 1)), "no step is missing and none is there twice"
    assert len(set(batches(trainer))) == len(metrics)
    settled = end["episodes"]["trained"] + end["discarded"].get("filtered", 0)
    told = sum(line["episodes"] + line["rejected_episodes"] for line in metrics)
    assert settled == told, "what was leased once more is in the weights once"
    counts = end["episodes"]
    assert counts["leased"] == 0
    assert counts["opened"] == sum(count for state, count in counts.items() if state != "opened")
    assert "Traceback" not in trainer.log.read_text()
