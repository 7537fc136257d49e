from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.runs import LEARNING_RATE
from ajet_sdk.settings import ConfigError
from ajet_trainer import config
from ajet_trainer.config import MINI_BATCH, SETTINGS, load


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        '[trainer]\nmodel = "m"\ngroups = 2\nmax_tokens = 60\n'
        "[verl]\nactor_rollout_ref.actor.optim.lr = 1e-5\n"
        '"+actor_rollout_ref.rollout.engine_kwargs.vllm.max_loras" = 3\n'
    )
    return path


def test_later_sources_win(file: Path) -> None:
    environ = {"AJET_PROXY_URL": "http://p", "AJET_EPISODE": "e"}
    environ |= {"AJET_TRAINER_GROUPS": "3", "AJET_TRAINER_SAVE_FREQ": "5"}
    config = load(str(file), ["groups=4", "model=n", "actor_rollout_ref.actor.optim.lr=1e-6"], environ)
    assert (config.model, config.groups, config.save_freq, config.max_tokens) == ("n", 4, 5, 60)
    assert config.proxy_url == "http://p"
    assert config.verl == {
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_loras": 3,
    }
    assert load(str(file), [], environ).groups == 3
    assert load(str(file)).groups == 2


def test_words_of_the_command_line_become_values(file: Path) -> None:
    words = ["engine_urls=http://a, http://b", "max_staleness=null", "run_dir=12"]
    theirs = ["verl.a.b=true", "a.c=[1, 2]", "a.d=x y", "a.e=False", "a.f=null"]
    config = load(str(file), words + theirs)
    assert (config.engine_urls, config.max_staleness, config.run_dir) == (("http://a", "http://b"), None, "12")
    assert config.attached and not load(str(file)).attached
    assert {k: v for k, v in config.verl.items() if k.startswith("a.")} == {
        "a.b": True, "a.c": [1, 2], "a.d": "x y", "a.e": False, "a.f": None,
    }  # fmt: skip


def test_verls_key_says_how_many_checkpoints_stay(file: Path) -> None:
    assert load(str(file)).keep_checkpoints == 2
    assert load(str(file), ["trainer.max_actor_ckpt_to_keep=5"]).keep_checkpoints == 5


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (["grops=3"], {}, r"^command line: unknown key 'grops'; did you mean 'groups'\?"),
        (["ahead=1"], {}, "ahead = 1 cannot be: a batch has groups = 2"),
        (["groups"], {}, "'groups' is not KEY=VALUE"),
        (["groups=many"], {}, "groups must be an integer, not 'many'"),
        (["groups=0"], {}, "groups must be above 0, not 0"),
        (["total_steps=-1"], {}, "total_steps must be at least 0, not -1"),
        (["max_staleness=-1"], {}, "max_staleness must be at least 0, not -1"),
        (["max_staleness=1.5"], {}, "max_staleness must be an integer"),
        (["overlap=-1"], {}, "overlap must be at least 0, not -1"),
        (["overlap=1"], {}, "overlap = 1 cannot be: .* set engine_urls, or leave overlap out"),
        (["overlap=2", "max_staleness=1", "engine_urls=http://a"], {}, "contradicts overlap = 2: .* or set it to 2"),
        (["groups=100001"], {}, "groups must be at most 100000, not 100001"),
        (["group_size=100001"], {}, "group_size must be at most 100000, not 100001"),
        (["group_wait_s=1e10"], {}, "group_wait_s must be at most 1000000000, not"),
        (["ahead=1000001"], {}, "ahead must be at most 1000000, not 1000001"),
        (["groups=1000", "overlap=1001", "engine_urls=http://a"], {}, "groups times overlap must be at most 1000000"),
        (["max_staleness=2147483648"], {}, "max_staleness must be at most 2147483647"),
        (["max_lead=2147483648"], {}, "max_lead must be at most 2147483647"),
        (["model_name="], {}, "model_name must have 1 to 1000 characters"),
        (["candidate=" + "x" * 1001], {}, "candidate must have 1 to 1000 characters"),
        (["no_signal=maybe"], {}, "no_signal must be one of keep, drop, not 'maybe'"),
        (["sampling=any"], {}, "sampling must be one of correct, exact, strict, not 'any'"),
        (["trainer.max_actor_ckpt_to_keep=0"], {}, "trainer.max_actor_ckpt_to_keep must be an integer above 0, not 0"),
        (["trainer.max_actor_ckpt_to_keep=null"], {}, "must be an integer above 0, not None"),
        ([f"{MINI_BATCH}=2", "groups=3"], {}, "updates of a step: a divisor of 3, not 2"),
        ([f"{MINI_BATCH}=0"], {}, "updates of a step: a divisor of 2, not 0"),
        ([f"{LEARNING_RATE}=fast"], {}, "optim.lr must be a number of at least 0, not 'fast'"),
        ([f"{LEARNING_RATE}=-1e-6"], {}, "optim.lr must be a number of at least 0, not -1e-06"),
        (["trainer.n_gpus_per_node=0"], {}, "trainer.n_gpus_per_node must be an integer above 0, not 0"),
        (["trainer.device=npu"], {}, "trainer.device must be cpu or cuda, not 'npu'"),
        (["engine_urls=http://a,b:1"], {}, "engine_urls must be http://HOST:PORT, not 'b:1'"),
        (["model="], {}, "model is required"),
        (["proxy_url="], {}, "proxy_url is required"),
        (["proxy_url=http://b..c:1"], {}, "proxy_url must be http://HOST:PORT, not 'http://b..c:1'"),
        (["proxy_url=http://a,http://b"], {}, "proxy_url must be http://HOST:PORT, not"),
        ([], {"AJET_PROXY_URL": "http://a,http://b"}, "proxy_url must be http://HOST:PORT, not"),
        (["tls_cert=c.pem", "proxy_url=http://b"], {}, "tls_cert is of no use"),
        (["key=k"], {}, "a command line can be read by others: set AJET_TRAINER_KEY"),
        (["verl=1"], {}, "unknown key 'verl'"),
        ([], {"AJET_TRAINER_GROPS": "1"}, "unknown key 'AJET_TRAINER_GROPS'; did you mean 'AJET_TRAINER_GROUPS'"),
    ],
)
def test_a_mistake_is_one_clear_line(file: Path, words: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(str(file), words, environ)
    assert "\n" not in error.value.message


def test_how_far_agents_may_be_ahead_bounds_how_stale_tokens_may_be(file: Path) -> None:
    attached = "engine_urls=http://a"
    for words, bound in (
        ([], None), (["overlap=0"], 0), (["overlap=0", attached], 0), (["overlap=2", attached], 2),
        (["overlap=2", "max_staleness=2", attached], 2), (["max_staleness=1"], 1),
    ):
        assert load(str(file), words).max_staleness == bound


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainer]\nmodle = 'x'", r"unknown key 'modle'; did you mean 'model'\?"),
        ("[trainers]\nx = 1", r"unknown table \[trainers\]; did you mean 'trainer'\?"),
        ("[mx]\nmath = 1", r"unknown table \[mx\]; did you mean 'mix'\?"),
        ("model = 'm'", "'model' stands in no table: put it under"),
        ("[trainer]\nmodel = '/no/such/folder'", "model: there is no folder /no/such/folder"),
        ("[trainer]\nmodel = 3", "model must be a string, not 3"),
        ("[trainer]\nmodel = 'x'\nengine_urls = [1]", "engine_urls must be a list of strings"),
        ("[trainer]\nmodel = 'x'\nproxy_url = ['http://a', 'http://b']", "proxy_url must be a string"),
        ("[trainer]\nmodel = 'x'\nkey = ['k', 'l']", "key must be a string$"),
        ("[trainer]\nmodel = 'x'\nkey = 'é'", "key holds characters that no key has"),
        ('[trainer]\nmodel = "x"\nkey = "a\\nb"', "key holds characters that no key has"),
        ('[trainer]\nmodel = "x"\nengine_key = "k\\n"', "engine_key holds characters that no key has"),
        ('[trainer]\nmodel = "x"\nrun_dir = "a\\u0000b"', "run_dir must be a path"),
        ("[trainer", "run.toml"),
        ("[verl]\nx = " + "[" * 5000, "run.toml"),
    ],
)
def test_a_bad_file_names_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(str(path))


def test_every_key_is_described() -> None:
    text = "\n".join(SETTINGS.describe())
    for name, found in SETTINGS.options.items():
        assert f"  {name} " in text
        assert found.doc in text and found.doc.endswith(".")


def test_the_key_of_engines_is_given_as_to_the_daemon() -> None:
    assert load(None, ["model=m"], {"AJET_UPSTREAM_KEY": "sesame\n"}).engine_key == "sesame"
    both = {"AJET_UPSTREAM_KEY": "sesame", "AJET_TRAINER_ENGINE_KEY": "mine"}
    assert load(None, ["model=m"], both).engine_key == "mine"
    with pytest.raises(ConfigError, match="engine_key"):
        load(None, ["model=m", "engine_key=sesame"])
    assert config.digest(load(None, ["model=m"], both)) == config.digest(load(None, ["model=m"]))


GATED = {
    "model": "m", "candidate": "next", "engine_urls": ("http://e",), "verl": {"actor_rollout_ref.model.lora_rank": 16},
}  # fmt: skip


def test_a_candidate_is_evaluated_for_long_and_more_checkpoints_stay() -> None:
    found = config.check(config.Config(**GATED))
    assert (found.eval_episodes, found.keep_checkpoints, found.promote_every, found.promote_margin) == (128, 5, 4, 0.1)
    assert config.check(config.Config(**GATED, eval_episodes=32)).eval_episodes == 32
    plain = config.check(config.Config(model="m"))
    assert (plain.eval_episodes, plain.keep_checkpoints) == (16, 2)
    config.check(config.Config(**GATED | {"verl": {}, "candidate_urls": ("http://f",)}))
    config.check(config.Config(**GATED, max_staleness=3))


@pytest.mark.parametrize(("changes", "param", "said"), [
    ({"candidate": "policy"}, "candidate", "is the name of the model that serves"),
    ({"engine_urls": ()}, "candidate", "users would be held for whole steps"),
    ({"verl": {}}, "candidate", "set candidate_urls, or train an adapter"),
    ({"verl": {}, "candidate_urls": (*GATED["engine_urls"], "http://f")}, "candidate_urls", "what serves has its"),
    ({"max_staleness": 2}, "max_staleness", "2 is too few: promote_every = 4 steps"),
    ({"overlap": 1}, "max_staleness", "1 is too few"),
    ({"eval_every": 10}, "eval_every", "evaluated by promote_every"),
    ({"eval_episodes": 1}, "eval_episodes", "one episode tells nothing"),
    ({"candidate": "", "candidate_urls": ("http://f",)}, "candidate_urls", "set candidate"),
    ({"candidate": "", "promote_every": 2}, "promote_every", "without a candidate"),
    ({"candidate": "", "promote_margin": 0.0}, "promote_margin", "without a candidate"),
    ({"save_freq": 1}, "save_freq", "each version that serves is saved"),
    ({"candidate_urls": ("f",)}, "candidate_urls", "must be http://HOST:PORT"),
])  # fmt: skip
def test_a_gate_that_cannot_work_is_refused_by_name(changes: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        config.check(config.Config(**GATED | changes))
    assert caught.value.param == param
