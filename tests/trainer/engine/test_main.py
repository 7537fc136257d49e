"""The end of a run that cannot start or cannot go on, as a user sees it: one line, the right status, no traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ajet_sdk.settings import ConfigError
from ajet_trainer.backends.verl.settings import ONE_PROCESS, RANKS, compose, defaults, everywhere, on_cpu, on_gpu
from ajet_trainer.config import Config
from ajet_trainer.run_folder import hold
from ajet_trainer.training import first_words
from tests.kit.ports import free_port
from tests.kit.trainer_process import PYTHON
from tests.trainer.stub_engine import stub_engine

IMPATIENT = """
from functools import partial
from ajet_trainer import cli
from ajet_trainer.link import Link
Link.of = partial(Link.of, deadline_s=1.0)
cli.main()
"""


def run(folder: Path, *words: str, text: str = "") -> tuple[int, str, str]:
    config, model = folder / "run.toml", folder / "m"
    model.mkdir(exist_ok=True)
    config.write_text(f'[trainer]\nmodel = "{model}"\nrun_dir = "{folder / "run"}"\n{text}')
    done = subprocess.run(
        [str(PYTHON), "-c", IMPATIENT, "run", "--config", str(config), *words],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return done.returncode, done.stdout, done.stderr


def test_a_proxy_that_is_not_there_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    status, out, err = run(tmp_path, f"proxy_url={url}")
    assert status == 1
    assert out == "looking for the proxy\n"
    assert err.startswith(f"ajet-trainer: no answer from {url}/ajet/v1/status: ")
    assert err.endswith("Is ajet-proxy running, and is proxy_url its address?\n")
    assert err.count("\n") == 1


def test_what_would_end_a_step_is_refused_before_ray_starts(tmp_path: Path) -> None:
    """`test_refused` has what else is refused, and with which words. The stub takes our key as a daemon does."""
    with stub_engine() as daemon:
        word = "algorithm.adv_estimator=remax"
        status, out, err = run(tmp_path, f"proxy_url={daemon.url}", "trainer.device=cpu", word)
    assert (status, out.splitlines()) == (2, ["looking for the proxy", "importing verl"])
    assert err.startswith("ajet-trainer: algorithm.adv_estimator ") and err.count("\n") == 1


def test_a_run_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, out, err = run(tmp_path, f"run_dir={tmp_path}/file/run")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ajet-trainer: run_dir '{tmp_path}/file/run' cannot be written to: ")


@pytest.mark.parametrize("model", ["not/there/yet", "models/qwen", "qwen"])
def test_a_model_that_nothing_gives_is_missed_before_anything_is_asked(tmp_path: Path, model: str) -> None:
    """A configuration is read on other hosts too, where the folder need not be."""
    status, out, err = run(tmp_path, f"model={model}")
    assert (status, out) == (2, "") and err.count("\n") == 1
    said = f"no folder {Path(model).absolute()}, and no hub or its cache gives {model!r}: give the path of a folder\n"
    assert err == f"ajet-trainer: model: there is {said}"


def test_one_trainer_at_a_time_works_in_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with hold(tmp_path / "run"):
        status, out, err = run(tmp_path)
    assert (status, out) == (2, "")
    assert err == f"ajet-trainer: another trainer is at work in run_dir '{tmp_path}/run'\n"
    assert not (tmp_path / "run" / "phase.json").exists()
    with hold(tmp_path / "run"):
        pass


def test_an_error_is_said_in_one_line() -> None:
    assert first_words(RuntimeError("it broke\nhere")) == "it broke"
    assert first_words(RuntimeError("Error in call to target:\nno such model\nkey: m")) == (
        "Error in call to target: no such model"
    )
    assert first_words(KeyError()) == "KeyError"
    traceback = 'ray::Server.launch() (pid=7)\n  File "a.py", line 1, in launch\n    go()\nValueError: no room\nmore'
    assert first_words(RuntimeError(traceback)) == "ValueError: no room"
    quoted = 'no kernel for this mask\n  File "a.py", line 1, in mask\n    f()\nSet VERBOSE=1 for more'
    assert first_words(RuntimeError(quoted)) == "no kernel for this mask", "code that is quoted is no other process"


@pytest.mark.parametrize(
    ("verl", "words"),
    [
        (
            {"actor_rollout_ref.actor.optim.lrr": 1},
            r"verl has no key '.*lrr'; did you mean 'actor_rollout_ref.actor.optim.lr'\?",
        ),
        ({"nothing_like_it": 1}, r"verl has no key 'nothing_like_it' \(write '\+nothing_like_it' to add it"),
    ],
)
def test_an_unknown_key_of_verl_names_the_nearest(verl: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compose(Config(model="m", verl=verl), "cpu", None)


def test_the_users_keys_win_and_free_parts_take_any(tmp_path: Path) -> None:
    verl = {
        "actor_rollout_ref.actor.optim.lr": 3e-6,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser": "hermes",
        "actor_rollout_ref.rollout.dtype": "float32",
        "+actor_rollout_ref.actor.something_new": 1,
    }
    tree = compose(Config(model="m", groups=3, max_tokens=900, verl=verl), "cpu", None)
    actor = tree.actor_rollout_ref
    assert (actor.actor.optim.lr, actor.rollout.dtype, actor.actor.something_new) == (3e-6, "float32", 1)
    assert actor.rollout.engine_kwargs.vllm == {
        "served_model_name": "policy", "generation_config": "vllm", "tool_call_parser": "hermes",
        "distributed_executor_backend": ONE_PROCESS,
    }  # fmt: skip
    two = compose(Config(model="m", verl={RANKS: 2}), "cpu", None).actor_rollout_ref.rollout
    assert two.engine_kwargs.vllm.distributed_executor_backend == "mp", "one process cannot hold two ranks"
    assert (actor.actor.ppo_mini_batch_size, tree.data.train_batch_size, actor.rollout.max_model_len) == (3, 3, 900)


def test_a_gpu_host_keeps_verls_own_defaults() -> None:
    """The CPU settings change nothing there: precision, offloading and sleeping stay verl's."""
    config = Config(model="m")
    ours, theirs = compose(config, "cuda", None), defaults()
    for key in set(on_cpu(config)) - set(everywhere(config)) - set(on_gpu(config)):
        assert OmegaConf.select(ours, key) == OmegaConf.select(theirs, key), key
