"""An adapter alone: what engines that hold several are told, in good days and bad ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.settings import ConfigError
from ajet_trainer.config import Config
from ajet_trainer.engines import EngineLost, adapters, same_model
from ajet_trainer.engines.vllm import Vllm
from tests.kit.http_server import JsonServer, Say
from tests.kit.ports import free_port
from tests.trainer.stub_engine import LOAD, UNLOAD, StubEngine

LORA = {"actor_rollout_ref.model.lora_rank": 4}
ENGINE = {"base": "base"}


@pytest.fixture
def config(engine: StubEngine, tmp_path: Path) -> Config:
    return Config(model="m", model_name="planner", engine_urls=(engine.url,), verl=dict(LORA), run_dir=str(tmp_path))


def made(home: Path, version: int) -> Path:
    """The folder of an adapter that was written whole."""
    written = adapters.begin(home, version)
    written.mkdir(parents=True)
    return adapters.finish(written)


def test_an_adapter_is_loaded_under_its_name_and_nothing_else_changes(engine: StubEngine, tmp_path: Path) -> None:
    engine.adapters["coder"] = "theirs"
    for version in (0, 1):
        engine.asked.clear()
        adapters.load_into([engine.url], "planner", folder := made(tmp_path, version))
        assert engine.adapters == {"coder": "theirs", "planner": str(folder)}
        assert engine.asked == ["/is_paused", "/v1/models", *[UNLOAD] * version, LOAD]


def test_each_push_is_in_a_folder_of_its_own_even_at_the_same_version(tmp_path: Path) -> None:
    """vLLM tells by name and folder what it has computed. A resumed run may train a version once more, otherwise."""
    assert made(tmp_path, 3) != made(tmp_path, 3)


def test_an_engine_that_refuses_the_adapter_answers_as_before(
    engine: StubEngine, other: StubEngine, tmp_path: Path
) -> None:
    old, new = made(tmp_path, 1), made(tmp_path, 2)
    adapters.load_into([engine.url, other.url], "planner", old)
    engine.refuses = lambda folder: folder == str(new)
    with pytest.raises(EngineLost, match=rf"{engine.url} did not take the adapter: HTTP 500 from {LOAD}: .*rank 16 is"):
        adapters.load_into([engine.url, other.url], "planner", new)
    assert engine.adapters == {"planner": str(old)} and other.adapters == {"planner": str(new)}


def test_an_engine_that_has_neither_adapter_is_said_to_have_none(engine: StubEngine, tmp_path: Path) -> None:
    adapters.load_into([engine.url], "planner", made(tmp_path, 1))
    engine.refuses = lambda folder: True
    with pytest.raises(EngineLost, match=r"; nor has it the old one again \(.+\): the next start"):
        adapters.load_into([engine.url], "planner", made(tmp_path, 2), 3.0)
    assert engine.adapters == {}


def test_the_engines_key_is_the_trainers_too(engine: StubEngine, config: Config, tmp_path: Path) -> None:
    engine.key = "sesame"
    with pytest.raises(EngineLost, match=r"HTTP 401 from /v1/models: .* set AJET_UPSTREAM_KEY for the trainer"):
        adapters.apart(config)
    assert adapters.apart(replace(config, engine_key="sesame")) is True
    adapters.load_into([engine.url], "planner", folder := made(tmp_path, 1), key="sesame")
    engine.adapters.clear()
    assert adapters.heal([engine.url], "planner", folder, "sesame") == [engine.url]


def test_a_frozen_engine_keeps_its_adapter(engine: StubEngine, tmp_path: Path) -> None:
    """Its calls in flight would go on with the old adapter, and count as the new version's."""
    engine.frozen, engine.adapters["planner"] = True, "old"
    with pytest.raises(EngineLost, match=r"is frozen, .* gate_mode = drain"):
        adapters.load_into([engine.url], "planner", made(tmp_path, 1))
    assert engine.adapters == {"planner": "old"}
    engine.lacks, engine.frozen = {"/is_paused"}, False
    adapters.load_into([engine.url], "planner", made(tmp_path, 2))


def test_the_names_say_whether_an_adapter_goes_alone(engine: StubEngine, other: StubEngine, config: Config) -> None:
    assert adapters.apart(config) is True
    engine.adapters["planner"] = "of an earlier run"
    assert adapters.apart(config) is True
    assert adapters.apart(replace(config, model_name="base")) is False
    assert adapters.apart(replace(config, engine_urls=())) is False
    model = "actor_rollout_ref.model"
    without: list[dict[str, Any]] = [{}, {f"{model}.lora_rank": 0}, {f"{model}.lora.rank": 8}]
    assert not any(adapters.apart(replace(config, verl=verl)) for verl in without)
    spelled: list[dict[str, Any]] = [{f"+{model}.lora_rank": 8}, {model: {"lora_rank": 8}}]
    assert all(adapters.apart(replace(config, verl=verl)) for verl in spelled)
    other.base = "planner"
    said = f"engine_urls: 'planner' is the model of {other.url} itself, and an adapter of the others"
    with pytest.raises(ConfigError, match=said):
        adapters.apart(replace(config, engine_urls=(engine.url, other.url)))


def test_an_engine_that_takes_no_adapters_is_refused_before_anything_starts(engine: StubEngine, config: Config) -> None:
    engine.lacks = {LOAD}
    with pytest.raises(ConfigError) as caught:
        adapters.apart(config)
    assert str(caught.value) == (
        f"model_name = 'planner' is no model of the engine at {engine.url}, which serves 'base', and it takes no "
        "adapter of that name: start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
    )
    assert not engine.adapters
    gone = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineLost, match=f"the engine at {gone} does not say what it serves"):
        adapters.apart(replace(config, engine_urls=(gone,)))


def test_an_engine_that_was_started_again_gets_its_adapter_again(engine: StubEngine, tmp_path: Path) -> None:
    folder, urls = made(tmp_path, 4), [engine.url, f"http://127.0.0.1:{free_port()}"]
    adapters.load_into(urls[:1], "planner", folder)
    assert adapters.heal(urls, "planner", folder) == []
    engine.adapters = {"coder": "theirs"}
    assert adapters.heal(urls, "planner", folder) == [engine.url]
    assert engine.adapters == {"coder": "theirs", "planner": str(folder)}
    engine.adapters["planner"] = "as it was started"
    assert adapters.heal(urls, "planner", folder) == [engine.url]


class Killed(BaseException):
    """As SIGKILL: nothing is done any more."""


def test_whenever_a_trainer_is_killed_its_engine_finds_what_it_was_told(
    engine: StubEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may read the adapters that it was told of at any time, and ends if one is gone. The next start goes on."""
    steps = ("begin", "mkdir", "finish", "folder_of", "unload_adapter", "load_adapter", "forget", "end")
    left = [0]

    def instant(name: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def step(*words: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return really(*words)

        return step

    def push(version: int) -> None:
        written = adapters.begin(tmp_path, version)
        written.mkdir(parents=True)
        folder = adapters.finish(written)
        adapters.load_into([engine.url], "planner", folder)
        adapters.forget(folder)

    def exists() -> None:
        assert all(Path(folder).is_dir() for folder in engine.adapters.values())

    engine.watch = exists
    made: dict[Any, tuple[str, ...]] = {
        adapters: ("begin", "finish", "forget"), Vllm: ("folder_of", "unload_adapter", "load_adapter"),
    }
    for place, name in ((place, name) for place, names in made.items() for name in names):
        monkeypatch.setattr(place, name, instant(name, getattr(place, name)))
    for version in range(3 * len(steps)):
        left[0] = version % len(steps)
        try:
            push(version)
        except Killed:
            exists()
        left[0] = -1
        push(version)
        assert Path(engine.adapters["planner"]).name.startswith(f"{version}-")
        kept = [one.name for one in tmp_path.iterdir()]
        assert 1 <= len(kept) <= 2 and not any(name.endswith("unfinished") for name in kept)


@pytest.mark.parametrize("said", [None, "welcome", [], {"data": None}, {"data": ["m"]}, {"data": [{"root": "m"}]}])
def test_what_is_no_list_of_models_is_an_engine_that_does_not_answer(
    config: Config, tmp_path: Path, said: Any
) -> None:
    """As from a proxy before an engine that is starting."""
    with JsonServer(lambda heard: Say(200, said)) as other:
        folder = made(tmp_path, 1)
        assert adapters.heal([other.url], "planner", folder) == []
        with pytest.raises(EngineLost, match="does not say what it serves"):
            adapters.apart(replace(config, engine_urls=(other.url,)))
        with pytest.raises(EngineLost, match="did not take the adapter"):
            adapters.load_into([other.url], "planner", folder)
        assert same_model.look(replace(config, engine_urls=(other.url,)), {}) == {}
