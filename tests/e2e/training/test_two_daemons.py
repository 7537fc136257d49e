"""The real trainer is fed by two daemons in front of its engine; one of them is killed, and comes back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.players import Players
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import TrainerProcess

GROUPS, SIZE = 2, 4


def policy_version(proxy: ProxyProcess) -> int:
    return int(proxy.report()["models"]["policy"]["policy_version"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_daemons_feed_one_trainer(tmp_path: Path) -> None:
    model = build(tmp_path / "tiny")
    with ProxyProcess(None, tmp_path / "one") as one, ProxyProcess(None, tmp_path / "two") as two:
        ours = {
            "model": str(model), "proxy_url": f"{one.url},{two.url}", "groups": GROUPS, "group_size": SIZE,
            "max_tokens": 256, "save_freq": 2,
        }  # fmt: skip
        players = {"model": "policy", "group_size": SIZE, "parallel": GROUPS * SIZE}
        with (
            TrainerProcess(tmp_path, ours, {"actor_rollout_ref.actor.optim.lr": 1e-4}, lease_s=15.0) as trainer,
            Players(one.url, **players), Players(two.url, **players),
        ):  # fmt: skip
            trainer.until(lambda: min(daemon.report()["episodes"]["trained"] for daemon in (one, two)) > 0, 400)
            two.kill()
            alone = len(trainer.metrics())
            trainer.until(lambda: len(trainer.metrics()) > alone + 2, 200)
            two.start()
            before = two.report()["episodes"]["trained"]
            trainer.until(lambda: two.report()["episodes"]["trained"] > before, 200)
            trainer.until(lambda: policy_version(one) == policy_version(two) > alone, 200)
            trainer.signal(signal.SIGTERM)
            assert trainer.wait(120) == 0
        ends = [daemon.report() for daemon in (one, two)]

    metrics = trainer.metrics()
    trained = sum(end["episodes"]["trained"] for end in ends)
    assert trained == sum(line["episodes"] for line in metrics), "what was leased once more is in the weights once"
    assert [end["episodes"]["leased"] for end in ends] == [0, 0]
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert "Traceback" not in trainer.log.read_text()
