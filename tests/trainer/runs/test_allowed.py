"""Wishes from afar. Everything here that is hostile is refused before any file is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.errors import BadRequest
from ajet_sdk.limits import check_name
from ajet_sdk.runs import MAX_CONFIG, flat, literal, merged, restarts, tables
from ajet_sdk.settings import ConfigError, toml_of
from ajet_trainer.config import OF_THE_HOST, load
from ajet_trainer.runs.allowed import KNOBS, Allowed, config_of, read

PROXY = "http://127.0.0.1:8484"
LR = "actor_rollout_ref.actor.optim.lr"
FILE = """
runs = "{runs}"
engines = ["http://127.0.0.1:8000/"]
[models]
small = "{model}"
[folders]
fast = "/dev/shm/fast"
[verl]
trainer.n_gpus_per_node = [1, 8]
"actor_rollout_ref.rollout.gpu_memory_utilization" = true
"algorithm.adv_estimator" = ["grpo", "my.module:mine"]
"""


@pytest.fixture
def allowed(tmp_path: Path) -> Allowed:
    (tmp_path / "model").mkdir()
    (tmp_path / "allow.toml").write_text(FILE.format(runs=tmp_path / "runs", model=tmp_path / "model"))
    return read(str(tmp_path / "allow.toml"))


def made(allowed: Allowed, trainer: Any = None, verl: Any = None) -> Any:
    keys = merged({}, flat({"trainer": {"model": "small", **(trainer or {})}, "verl": verl or {}}))
    document = allowed.document("r", keys, PROXY)
    config_of(document)
    return document


@pytest.mark.parametrize("word", ["False", "true", "null", "None", "1e-5", "16", "token"])
def test_a_word_means_the_same_from_afar_and_on_the_host(allowed: Allowed, tmp_path: Path, word: str) -> None:
    key = "algorithm.rollout_correction.rollout_is"
    (tmp_path / "file.toml").write_text(toml_of(made(allowed, verl={key: literal(word)})))
    assert load(str(tmp_path / "file.toml")).verl[key] == load(None, ["model=m", f"{key}={word}"]).verl[key]
    assert isinstance(load(None, ["model=m", f"{key}={word}"]).verl[key], str) == (word == "token")


def test_groups_that_a_step_cannot_update_are_refused_before_they_are_wanted(allowed: Allowed) -> None:
    size = {"actor_rollout_ref.actor.ppo_mini_batch_size": 4}
    made(allowed, {"groups": 8}, size)
    with pytest.raises(ConfigError, match="a divisor of 6, not 4"):
        made(allowed, {"groups": 6}, size)


def test_names_become_the_hosts_folders(allowed: Allowed, tmp_path: Path) -> None:
    document = made(
        allowed, {"groups": 3, "engine_urls": ["http://127.0.0.1:8000"], "weights_dir": "fast", "model_name": "a/b"},
        {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-5, "betas": [0.9, 0.99]}}}, "trainer.n_gpus_per_node": 8},
    )
    assert document["trainer"] == {
        "run_dir": str(tmp_path / "runs" / "r"), "proxy_url": PROXY, "model": str(tmp_path / "model"), "groups": 3,
        "engine_urls": ["http://127.0.0.1:8000"], "weights_dir": "/dev/shm/fast", "model_name": "a/b",
    }
    assert document["verl"][LR] == 1e-5
    (tmp_path / "file.toml").write_text(toml_of(document))
    assert load(str(tmp_path / "file.toml")) == config_of(document)


HOSTILE_TRAINER = [
    {"model": "/etc"}, {"model": "../small"}, {"model": "small/../../etc"}, {"model": ["small"]}, {"model": ""},
    {"model": "Small"}, {"model": "small\x00"}, {"model": "${oc.env:HOME}"}, {"model": "~"}, {"model": "./small"},
    {"weights_dir": "/tmp"}, {"weights_dir": "fast/.."}, {"run_dir": "/tmp/x"}, {"key": "k"}, {"key": ["k"]},
    {"tls_cert": "/etc/shadow"}, {"proxy_url": "http://evil"}, {"engine_urls": "http://169.254.169.254"},
    {"engine_urls": ["http://127.0.0.1:8000", "http://evil"]}, {"engine_urls": ["http://127.0.0.1:8000@evil"]},
    {"engine_urls": "file:///etc/passwd"}, {"model_name": "--help"}, {"model_name": "a/../../b"},
    {"model_name": "${oc.env:AJET_TRAINER_KEY}"}, {"model_name": "a b"}, {"model_name": "../a"}, {"groups": -1},
    {"groups": "many"}, {"sampling": "$(id)"}, {"no_signal": "/bin/sh"}, {"lease_s": 3}, {"gruops": 4},
    {"key_file": "/etc/passwd"}, {"verl": 1}, {"total_steps": 1.5},
]  # fmt: skip
HOSTILE_VERL = [
    {LR: "${oc.env:AJET_TRAINER_KEY}"}, {LR: "$HOME"}, {LR: ["${oc.env:HOME}"]}, {LR: "file:///etc/passwd"},
    {LR: "/etc/passwd"}, {LR: "a.b"}, {LR: "x:y"}, {LR: "a b"}, {LR: ""}, {LR: "`id`"},
    {"actor_rollout_ref.actor.policy_loss.loss_mode": "/tmp/mine.py:loss"},
    {"actor_rollout_ref.actor.policy_loss.loss_mode": "os:system"},
    {"algorithm.adv_estimator": "other.module:mine"}, {"algorithm.adv_estimator": True},
    {"actor_rollout_ref.model.path": "/etc"}, {"critic.model.path": "x"},
    {"actor_rollout_ref.model.external_lib": "os"},
    {"reward.custom_reward_function.path": "/tmp/x.py"}, {"data.custom_cls.path": "pkg://x"},
    {"actor_rollout_ref.rollout.engine_kwargs.vllm.model": "x"}, {"trainer.logger": ["wandb"]},
    {"actor_rollout_ref.model.trust_remote_code": True}, {"trainer.default_local_dir": "/"},
    {"actor_rollout_ref.actor.optim.optimizer_impl": "os"}, {"ray_kwargs.ray_init.runtime_env": "x"},
    {"trainer.n_gpus_per_node": 2}, {"trainer.n_gpus_per_node": True}, {"trainer.n_gpus_per_node": 8.0},
    {"actor_rollout_ref.rollout.gpu_memory_utilization": "${env:X}"}, {"actor_rollout_ref.actor.optim.lrr": 1},
]  # fmt: skip
HOSTILE_KEYS = [
    {"verl": {"actor_rollout_ref[actor].optim.lr": 1}}, {"verl": {"actor_rollout_ref.actor.optim[lr]": 1}},
    {"verl": {f"+{LR}": 1}}, {"verl": {f"++{LR}": 1}}, {"verl": {f"~{LR}": 1}}, {"verl": {f" {LR}": 1}},
    {"verl": {f"{LR}.": 1}}, {"verl": {f".{LR}": 1}}, {"verl": {"a..b": 1}}, {"verl": {'"a"': 1}}, {"verl": {"": 1}},
    {"verl": {"a\n[trainer]\nkey": 1}}, {"verl": {"a=b": 1}}, {"verl": {"ä": 1}}, {"verl": {"a": {}}},
    {"verl": {"a": [[1]]}}, {"verl": {"a": [{"b": 1}]}}, {"verl": {"a": [None]}}, {"verl": {"a": {"b": {"": 1}}}},
    {"verl": {"actor_rollout_ref": {"actor.optim": {"lr": 1}}, LR: 2}}, {"verl": {"a": 1, "a.b": 2}},
    {"verl": {"a.b": {"c": 1}, "a": {"b.c": 2}}}, {"secrets": {"key": "k"}}, {"trainer": "model"}, {"trainer": None},
    {"trainer": {"model": "m" * MAX_CONFIG}}, {"trainer": {"a": "\ud800"}}, {"trainer": {"a": float("nan")}},
    {"": {}}, {"TRAINER": {}}, {"verl": {"a": 2**70}},
]  # fmt: skip


@pytest.mark.parametrize("trainer", HOSTILE_TRAINER, ids=str)
def test_hostile_values_of_the_trainers_keys(allowed: Allowed, trainer: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        made(allowed, trainer)
    assert caught.value.param == f"trainer.{next(iter(trainer))}" or caught.value.param in trainer


@pytest.mark.parametrize("verl", HOSTILE_VERL, ids=str)
def test_hostile_values_of_verls_keys(allowed: Allowed, verl: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        made(allowed, {}, verl)
    assert caught.value.param == f"verl.{next(iter(verl))}"


@pytest.mark.parametrize("config", HOSTILE_KEYS, ids=lambda config: str(config)[:60])
def test_a_key_has_one_spelling(config: Any) -> None:
    with pytest.raises(BadRequest):
        flat(config)


def test_the_shares_of_lanes_come_from_afar(allowed: Allowed, tmp_path: Path) -> None:
    keys = flat({"trainer": {"model": "small"}, "mix": {"terminal-bench": 0.25, "math 2": 0.75}})
    document = allowed.document("r", keys, PROXY)
    (tmp_path / "file.toml").write_text(toml_of(document))
    assert load(str(tmp_path / "file.toml")) == config_of(document)
    assert config_of(document).mix[0].shares == {"terminal-bench": 0.25, "math 2": 0.75}
    assert restarts(["mix.math", "trainer.groups", "trainer.model"]) == ["trainer.model"]


@pytest.mark.parametrize(
    "mix", [{"a": 0.5}, {"a": "much"}, {"a": -1, "b": 2}, {"a": [1]}, {"a/b": 1}, {"a": {}}, {"": 1}, {"a]b": 1}]
)
def test_hostile_shares(allowed: Allowed, mix: Any) -> None:
    with pytest.raises(BadRequest):
        config_of(allowed.document("r", flat({"trainer": {"model": "small"}, "mix": mix}), PROXY))


def test_what_the_host_lists_is_taken_as_it_is(allowed: Allowed) -> None:
    assert made(allowed, {}, {"algorithm.adv_estimator": "my.module:mine"})["verl"] == {
        "algorithm.adv_estimator": "my.module:mine"
    }


def test_an_unknown_key_is_told_the_nearest(allowed: Allowed) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'trainer.gruops'; did you mean 'groups'\?"):
        made(allowed, {"gruops": 1})
    with pytest.raises(ConfigError, match=r"cannot be set from afar.*; did you mean 'actor_rollout_ref.*optim.lr'"):
        made(allowed, {}, {"actor_rollout_ref.actor.optim.lrr": 1})


def test_no_knob_names_a_file_a_function_or_a_place() -> None:
    for part in ("path", "dir", "impl", "cls", "lib", "func", "kwargs", "engine", "logger", "url", "code", "name"):
        assert not [knob for knob in KNOBS if part in knob.rpartition(".")[2]]


@pytest.mark.parametrize("name", OF_THE_HOST)
def test_nothing_of_the_host_is_set_from_afar(allowed: Allowed, name: str) -> None:
    with pytest.raises(ConfigError, match="the host's to say"):
        made(allowed, {name: "x"})


@pytest.mark.parametrize(("text", "said"), [
    ("", "runs is required"), ("runs = 3", "runs is required"),
    ('runs = "a\\u0000b"', "runs is required"), ('runs = "r"\nmodel = "x"', "unknown key 'model'"),
    ('runs = "r"\nmodels = ["x"]', "models must be a table"), ('runs = "r"\n[models]\na = 1', r"\[models\] must give"),
    ('runs = "r"\nengines = "http://a:1"', "engines must be a list"),
    ('runs = "r"\nengines = ["x"]', "engines must be a list"),
    ('runs = "r"\n[verl]\na.b = 3', "a.b in .verl. must be true"), ('runs = "r"\n[verl]\na = false', "must be true"),
    ("runs = ", "is not TOML"),
])  # fmt: skip
def test_a_file_of_the_host_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "allow.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read(str(tmp_path / "allow.toml"))


def test_nothing_is_allowed_by_default(tmp_path: Path) -> None:
    (tmp_path / "allow.toml").write_text(f'runs = "{tmp_path}"')
    allowed = read(str(tmp_path / "allow.toml"))
    with pytest.raises(ConfigError, match="must be one of none: models"):
        allowed.document("r", {"trainer.model": "small"}, PROXY)
    with pytest.raises(ConfigError, match="must be of none: engines"):
        allowed.document("r", {"trainer.engine_urls": "http://127.0.0.1:8000"}, PROXY)
    with pytest.raises(ConfigError, match="no table other"):
        allowed.document("r", {"other.math": 1}, PROXY)


# -- the form

leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(0, 1) | st.text(max_size=3)
words = st.text("ab_", min_size=1, max_size=2)
nested = st.recursive(leaves | st.lists(st.integers()), lambda inner: st.dictionaries(words, inner, max_size=3))
trees = st.dictionaries(words, nested, max_size=4)


@given(st.fixed_dictionaries({"verl": trees}))
def test_a_flat_configuration_is_the_same_however_it_was_nested(config: Any) -> None:
    try:
        found = flat(config)
    except BadRequest:
        return
    assert flat(tables(found)) == found
    assert merged({}, found) == merged(found, found) == {key: one for key, one in found.items() if one is not None}


@given(st.text(max_size=70))
def test_a_name_of_a_run_is_a_folder_within_its_parent(name: str) -> None:
    try:
        check_name(name)
    except BadRequest:
        return
    assert Path("/runs", name).parent == Path("/runs")
    assert Path("/runs", name).resolve() == Path("/runs", name)
