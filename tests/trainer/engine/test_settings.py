"""What may stand in ``[verl]``: what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_trainer.config import Config, ConfigError

ACTOR = "actor_rollout_ref.actor"


def composed(verl: dict[str, Any], *, device: str = "cuda", **ours: Any) -> Any:
    from ajet_trainer.verl_backend.settings import compose

    return compose(Config(**({"model": "m"} | ours), verl=verl), device, None)


def refused(verl: dict[str, Any], **ours: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        composed(verl, **ours)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("actor_rollout_ref.rollout.n", 8, "group_size"),
        ("data.train_batch_size", 64, "groups"),
        ("trainer.default_local_dir", "/elsewhere", "run_dir"),
        ("trainer.resume_mode", "disable", "run_dir"),
        ("trainer.resume_from_path", "/elsewhere/global_step_3", "run_dir"),
        (f"{ACTOR}.checkpoint.async_save", True, "whole"),
        ("critic.checkpoint.async_save", True, "whole"),
        ("trainer.v1.trainer_mode", "sync", "placement"),
        ("transfer_queue.enable", False, "TransferQueue"),
    ],
)
def test_what_exactly_once_rests_on_is_not_to_be_changed(key: str, value: object, words: str, verl_here: None) -> None:
    said = refused({key: value})
    assert said.startswith(f"{key} is not to be changed: ")
    assert words in said


def test_neither_a_plus_nor_a_table_is_a_way_around_it(verl_here: None) -> None:
    assert refused({"+data.train_batch_size": 64}) == refused({"++data.train_batch_size": 64})
    assert refused({"+trainer.v1": {"trainer_mode": "sync"}}).startswith("trainer.v1.trainer_mode is not")
    assert refused({"trainer.v1": None}).startswith("trainer.v1.trainer_mode is not")
