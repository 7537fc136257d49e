"""The trainer is killed in the middle of a step, started again, loses its engine, is started again and told to stop."""

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
from tests.kit.trainer_process import TrainerFailed, TrainerProcess, living

GROUPS, SIZE, SAVE_FREQ = 2, 4, 2


def steps(trainer: TrainerProcess) -> list[int]:
    return [line["step"] for line in trainer.metrics()]


def beginnings(trainer: TrainerProcess) -> list[int]:
    """The steps from which each of its lives went on."""
    return [int(step) for step in re.findall(r"training from step (\d+)", trainer.log.read_text())]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_may_die_at_any_time(tmp_path: Path) -> None:
    model = build(tmp_path / "tiny")
    with ProxyProcess(None, tmp_path / "proxy") as proxy:
        ours = {
            "model": str(model), "proxy_url": proxy.url, "groups": GROUPS, "group_size": SIZE, "max_tokens": 256,
            "save_freq": SAVE_FREQ,
        }  # fmt: skip
        with (
            TrainerProcess(tmp_path, ours, {"actor_rollout_ref.actor.optim.lr": 1e-4}, lease_s=15.0) as trainer,
            Players(proxy.url, model="policy", group_size=SIZE, parallel=GROUPS * SIZE),
        ):
            trainer.until(lambda: 3 in steps(trainer), 400)
            trainer.until(lambda: trainer.phase() == "training", 60)
            first_life = trainer.below()
            trainer.signal(signal.SIGKILL)
            trainer.wait(10)
            killed_at = trainer.metrics()

            trainer.start()
            trainer.until(lambda: len(beginnings(trainer)) == 2, 400)
            resumed = beginnings(trainer)[1]
            assert resumed % SAVE_FREQ == 0 and abs(resumed - len(killed_at)) < SAVE_FREQ
            assert living(first_life, 5) == []
            trainer.until(lambda: len(steps(trainer)) > resumed + 1, 200)
            engine = [process for process in trainer.below() if "EngineCore" in " ".join(process.cmdline())]
            engine[0].kill()
            assert trainer.wait(120) == 1
            assert proxy.report()["models"]["policy"]["gate"] == "open"
            assert "the engine" in trainer.log.read_text()

            reached = max(steps(trainer))
            for _ in range(2):  # as a supervisor would: vLLM's worker on a CPU was seen to die by itself at its start
                trainer.start()
                with suppress(TrainerFailed):
                    trainer.until(lambda: max(steps(trainer), default=0) > reached, 400)
                    break
            third_life = trainer.below()
            trainer.signal(signal.SIGTERM)
            assert trainer.wait(120) == 0
            assert living(third_life, 20) == []
        time.sleep(1.0)
        status = proxy.report()

    metrics = trainer.metrics()
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    kept = min(resumed, len(killed_at))
    assert [line["batch"] for line in metrics[:kept]] == [line["batch"] for line in killed_at[:kept]]
    batches = [line["batch"] for line in metrics]
    assert len(set(batches)) == len(batches)
    episodes = status["episodes"]
    settled = episodes["trained"] + status["discarded"].get("filtered", 0)
    assert settled == sum(line["episodes"] + line["rejected_episodes"] for line in metrics)
    assert episodes["leased"] == 0
    assert episodes["opened"] == sum(count for state, count in episodes.items() if state != "opened")
    assert "Traceback" not in trainer.log.read_text()
