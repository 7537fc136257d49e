from __future__ import annotations

from collections import Counter
from pathlib import Path

from ajet_sdk.settings import toml_of
from ajet_trainer.config import load
from integrations.quickstart.guess import HIGHEST, LOWEST
from integrations.quickstart.plan import MODEL_NAME, Plan, task_of


def test_the_seed_decides_the_secrets_and_nothing_else_does() -> None:
    assert Plan(seed=4).secrets() == Plan(seed=4, lr=0.0).secrets()
    assert Plan(seed=4).secrets() != Plan(seed=5).secrets()


def test_every_number_comes_once_before_one_comes_again() -> None:
    plan = Plan(steps=20)
    secrets = [secret for step in plan.secrets() for secret in step]
    numbers = set(range(LOWEST, HIGHEST + 1))
    assert set(secrets[:20]) == numbers
    assert Counter(secrets) == Counter(dict.fromkeys(numbers, 2))
    assert all(low <= 10 < high for low, high in plan.secrets()), "a step is not all low or all high numbers"


def test_each_group_of_a_step_has_a_range_of_its_own() -> None:
    for groups in (1, 2, 3, 7, 20):
        steps = Plan(steps=40, groups=groups).secrets()
        assert all(list(step) == sorted(set(step)) for step in steps)
        ranges = [set(numbers) for numbers in zip(*steps, strict=True)]
        assert sum(map(len, ranges)) == len(set.union(*ranges)) == HIGHEST


def test_the_trainer_reads_the_configuration_that_is_written(tmp_path: Path) -> None:
    file, model = tmp_path / "trainer.toml", tmp_path / 'm "x"'
    model.mkdir()
    plan = Plan(steps=7, seed=3, lr=0.0)
    tables = plan.tables(model=model, proxy_url="http://127.0.0.1:1", run_dir=tmp_path / "run")
    file.write_text(toml_of(tables))
    config = load(str(file))
    assert (config.model, config.model_name, config.total_steps) == (str(model), MODEL_NAME, 7)
    assert (config.groups, config.group_size, config.save_freq) == (plan.groups, plan.group_size, 0)
    assert config.verl == {
        "trainer.device": "cpu", "actor_rollout_ref.actor.optim.lr": 0.0,
        "actor_rollout_ref.rollout.seed": 3, "trainer.max_actor_ckpt_to_keep": 1,
    }  # fmt: skip


def test_a_gpu_is_shared_by_trainer_and_engine() -> None:
    verl = Plan(device="cuda").tables(model=Path("m"), proxy_url="http://127.0.0.1:1", run_dir=Path("r"))["verl"]
    assert verl["trainer.device"] == "cuda" and verl["actor_rollout_ref.rollout.gpu_memory_utilization"] < 0.5


def test_a_secret_that_comes_again_is_another_task() -> None:
    assert task_of(1, 7) != task_of(11, 7)
