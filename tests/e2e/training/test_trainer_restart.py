"""A trainer that two daemons feed is killed in the middle of a step, started again, loses its engine, is started again,
loses a daemon, which comes back, and is told to stop."""

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


def policy_version(proxy: ProxyProcess) -> int:
    return int(proxy.report()["models"]["policy"]["policy_version"])


def trained_by(proxy: ProxyProcess) -> int:
    return int(proxy.report()["episodes"]["trained"])


def steps(trainer: TrainerProcess) -> list[int]:
    return [line["step"] for line in trainer.metrics()]


def beginnings(trainer: TrainerProcess) -> list[int]:
    """The steps from which each of its lives went on."""
    return [int(step) for step in re.findall(r"training from step (\d+)", trainer.log.read_text())]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_and_what_it_needs_may_die_at_any_time(tmp_path: Path) -> None:
    model = build(tmp_path / "tiny")
    with ProxyProcess(None, tmp_path / "one") as one, ProxyProcess(None, tmp_path / "two") as two:
        ours = {
            "model": str(model), "proxy_url": f"{one.url},{two.url}", "groups": GROUPS, "group_size": SIZE,
            "max_tokens": 256, "save_freq": SAVE_FREQ,
        }  # fmt: skip
        players = {"model": "policy", "group_size": SIZE, "parallel": GROUPS * SIZE}
        with (
            TrainerProcess(tmp_path, ours, {"actor_rollout_ref.actor.optim.lr": 1e-4}, lease_s=15.0) as trainer,
            Players(one.url, **players), Players(two.url, **players),
        ):  # fmt: skip
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
            assert [daemon.report()["models"]["policy"]["gate"] for daemon in (one, two)] == ["open", "open"]
            assert "the engine" in trainer.log.read_text()

            reached = max(steps(trainer))
            for _ in range(2):  # as a supervisor would: vLLM on a CPU was seen to die by itself at its start
                trainer.start()
                with suppress(TrainerFailed):
                    trainer.until(lambda: max(steps(trainer), default=0) > reached, 400)
                    break
            third_life = trainer.below()
            trainer.until(lambda: min(trained_by(daemon) for daemon in (one, two)) > 0, 200)
            two.kill()
            alone = len(steps(trainer))
            trainer.until(lambda: len(steps(trainer)) > alone + 2, 200)
            two.start()
            before = trained_by(two)
            trainer.until(lambda: trained_by(two) > before, 200)
            trainer.until(lambda: policy_version(one) == policy_version(two) > alone, 200)
            trainer.signal(signal.SIGTERM)
            assert trainer.wait(120) == 0
            assert living(third_life, 20) == []
        time.sleep(1.0)
        ends = [daemon.report() for daemon in (one, two)]

    metrics = trainer.metrics()
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    kept = min(resumed, len(killed_at))
    assert [line["batch"] for line in metrics[:kept]] == [line["batch"] for line in killed_at[:kept]]
    batches = [line["batch"] for line in metrics]
    assert len(set(batches)) == len(batches)
    settled = sum(end["episodes"]["trained"] + end["discarded"].get("filtered", 0) for end in ends)
    told = sum(line["episodes"] + line["rejected_episodes"] for line in metrics)
    assert settled == told, "what was leased once more is in the weights once"
    for end in ends:
        assert end["episodes"]["leased"] == 0
        counts = end["episodes"]
        assert counts["opened"] == sum(count for state, count in counts.items() if state != "opened")
    assert "Traceback" not in trainer.log.read_text()
