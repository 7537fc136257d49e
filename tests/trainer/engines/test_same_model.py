"""Engines serve the model that is trained, by what they say: at the start, and ever after."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.settings import ConfigError
from ajet_trainer.config import Config, check, digest
from ajet_trainer.engines import EngineLost, same_model
from ajet_trainer.engines.same_model import Served, look, started_again
from tests.kit.ports import free_port
from tests.trainer.stub_engine import StubEngine, stub_engine

CONFIG = {"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 128, "max_position_embeddings": 2048}
ENGINE = {"root": "models/elsewhere"}


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return path


@pytest.fixture
def engine(engine: StubEngine) -> StubEngine:
    """It has an adapter of somebody else."""
    engine.adapters["coder"] = "x"
    return engine


@pytest.fixture
def config(engine: StubEngine, tmp_path: Path) -> Config:
    return Config(model=str(folder(tmp_path / "m")), model_name="policy", engine_urls=(engine.url,))


def test_an_engine_of_the_same_model_is_taken(engine: StubEngine, config: Config, tmp_path: Path) -> None:
    said = {engine.url: Served((("policy", "models/elsewhere", 2048),), "default")}
    assert look(config, {}) == said
    engine.root, engine.length = str(folder(tmp_path / "copy")), 1024
    assert look(config, {}).keys() == said.keys()
    assert look(replace(config, model="a/hub-name"), {}).keys() == said.keys()
    assert look(replace(config, engine_urls=()), {}) == {}


def test_an_engine_of_another_folder_is_refused_by_its_configuration(
    engine: StubEngine, config: Config, tmp_path: Path
) -> None:
    engine.root = str(folder(tmp_path / "other", num_hidden_layers=3))
    with pytest.raises(EngineLost, match=r"serves another model: its num_hidden_layers is 3, and"):
        look(config, {})


def test_an_engine_with_a_longer_context_than_the_model_has_is_refused(
    engine: StubEngine, config: Config, tmp_path: Path
) -> None:
    engine.length = 4096
    with pytest.raises(EngineLost, match=r"has a context of 4096 tokens, and .* has 2048\. It was sent nothing"):
        look(config, {})
    scaled = folder(tmp_path / "scaled", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    look(replace(config, model=str(scaled)), {})


def test_an_engine_that_is_started_again_with_another_model_is_refused(engine: StubEngine, config: Config) -> None:
    before = look(config, {})
    engine.root = "models/other"
    with pytest.raises(EngineLost, match=r"again with another model: it serves policy from models/other with"):
        look(config, before)


def test_an_engine_that_is_started_again_forgets_its_version(engine: StubEngine, config: Config) -> None:
    before = Served((), "7")
    assert started_again(before, Served((), "default"))
    assert not any(started_again(one, Served((), "default")) for one in (None, Served(()), Served((), "default")))
    assert not started_again(before, Served((), None)) and not started_again(before, Served((), "8"))


def test_who_does_not_answer_is_left_out_and_who_refuses_is_named(engine: StubEngine, config: Config) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    assert look(replace(config, engine_urls=(gone,)), {}) == {}
    engine.status["/v1/models"] = 401
    with pytest.raises(EngineLost, match=r"does not say what it serves: HTTP 401 .* AJET_UPSTREAM_KEY"):
        look(config, {})


def test_a_model_that_sees_is_known_by_its_text() -> None:
    seeing = {"model_type": "vl", "text_config": {"model_type": "text", "hidden_size": 8, "vocab_size": None}}
    assert same_model.shape(seeing) == {"model_type": "text", "hidden_size": 8}
    assert same_model.context({"text_config": {"max_position_embeddings": 9}}) == 9 and same_model.context({}) is None


def test_an_engine_must_have_the_name_unless_it_is_sent_an_adapter(engine: StubEngine, config: Config) -> None:
    with pytest.raises(EngineLost, match=r"serves no model by the name 'planner' \(model_name\), but policy"):
        look(replace(config, model_name="planner"), {})
    lora = {"actor_rollout_ref.model.lora_rank": 8}
    assert look(replace(config, model_name="planner", verl=lora), {})


def test_the_only_model_that_engines_serve_is_taken_where_none_is_named(engine: StubEngine, config: Config) -> None:
    said, before = list[str](), (config := check(config))
    assert same_model.as_served(config, said.append) == before and not said, "it serves the name"
    engine.base = "Qwen/Qwen3-8B"
    found = same_model.as_served(config, said.append)
    assert found.model_name == "Qwen/Qwen3-8B" and "model_name = 'Qwen/Qwen3-8B': the engine serves it" in said[0]
    assert digest(found) == digest(config), "a supervisor knows the one that was given"
    assert look(found, {}), "adapters do not count"
    beside = replace(config, candidate="Qwen/Qwen3-8B", candidate_urls=(engine.url,))
    with pytest.raises(ConfigError, match="'Qwen/Qwen3-8B' is the name of the model that serves"):
        same_model.as_served(beside, said.append)
    said.pop()
    with stub_engine("other") as other:
        for left in (
            replace(config, model_name="planner"),
            replace(config, engine_urls=(engine.url, other.url)),
            replace(config, engine_urls=(f"http://127.0.0.1:{free_port()}",)),
            replace(config, verl={"actor_rollout_ref.model.lora_rank": 8}),
            replace(config, engine_urls=()),
        ):
            assert same_model.as_served(left, said.append) == left
    assert len(said) == 1


def test_an_engine_that_cannot_take_weights_is_found_before_the_model_is_loaded(
    engine: StubEngine, config: Config
) -> None:
    engine.lacks.add("/is_paused")
    with pytest.raises(EngineLost, match=r"takes no weights: start vLLM with VLLM_SERVER_DEV_MODE=1$"):
        look(config, {})
    lora = {"actor_rollout_ref.model.lora_rank": 8}
    assert look(replace(config, model_name="planner", verl=lora), {}), "which is sent the adapter by another route"
