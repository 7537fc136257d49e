"""Engines that stand alone: the folder in which weights travel to them, and what they get who were started again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ajet_sdk.settings import ConfigError
from ajet_trainer.config import Config
from ajet_trainer.engines import EngineLost, same_model
from ajet_trainer.engines.attached import Attached, attached, weights_folder
from tests.trainer.stub_engine import LOAD, StubEngine


def test_weights_travel_in_a_folder_of_the_runs_own(tmp_path: Path) -> None:
    shared, models = tmp_path / "shared", tmp_path / "shared" / "5"
    models.mkdir(parents=True)
    config = Config(
        model="m", run_dir=str(tmp_path / "run"), engine_urls=("http://e",), weights_dir=str(shared),
    )
    with weights_folder(config) as folder, weights_folder(replace(config, run_dir="other")) as other:
        assert folder.parent == other.parent == shared and folder != other
        (folder / "6").mkdir()
    assert [path.name for path in shared.iterdir()] == ["5"]
    folder.mkdir()
    (folder / "left by a killed run").touch()
    with weights_folder(config) as again:
        assert again == folder and not list(folder.iterdir())


def test_what_a_killed_run_left_in_shared_memory_goes_with_the_next(tmp_path: Path) -> None:
    config = Config(model="m", run_dir=str(tmp_path / "run"), engine_urls=("http://e",))
    with weights_folder(config) as first:
        assert first.stat().st_mode & 0o777 == 0o700
        (first / "1").mkdir()
        with weights_folder(config) as second:
            assert second != first and not first.exists()
    assert not second.exists()


def test_the_folder_of_adapters_outlives_the_run(tmp_path: Path) -> None:
    config = Config(model="m", run_dir=str(tmp_path), engine_urls=("http://e",))
    with weights_folder(config, apart=True) as folder:
        assert folder == tmp_path / "adapters"
        (folder / "1").mkdir()
    with weights_folder(config, apart=True) as again:
        assert again == folder and (folder / "1").exists()
    with weights_folder(replace(config, weights_dir=str(tmp_path / "shared")), apart=True) as shared:
        assert shared.parent == tmp_path / "shared"
    assert shared.is_dir()


def test_weights_are_sent_in_the_dtype_that_all_engines_tell(
    engine: StubEngine, other: StubEngine, tmp_path: Path
) -> None:
    engines = Attached(Config(model="m", engine_urls=(engine.url, other.url)), tmp_path)
    assert engines.dtype() is None, "they tell nothing"
    engine.dtype = "torch.bfloat16"
    assert engines.dtype() is None, "one of them tells nothing"
    other.dtype = engine.dtype
    assert engines.dtype() == "bfloat16"
    other.dtype = "torch.float16"
    assert engines.dtype() is None
    engine.dtype = other.dtype
    assert engines.dtype() == "float16"
    engine.quantization = other.quantization = "fp8"
    assert engines.dtype() is None, "what it rounds to, it rounds by itself"


def test_only_engines_that_stand_alone_are_sent_weights() -> None:
    with attached(Config(model="m"), lambda: None, pytest.fail) as none:
        assert none is None


@pytest.fixture
def config(engine: StubEngine, other: StubEngine) -> Config:
    return Config(model="m", engine_urls=(engine.url, other.url))


def test_engines_that_are_started_again_get_the_last_weights_again(
    engine: StubEngine, other: StubEngine, config: Config, tmp_path: Path
) -> None:
    """They alone. One with another model ends the run, and is sent nothing."""
    said = list[str]()
    engines = Attached(config, tmp_path, say=said.append)
    assert engines.push(3, Path.mkdir) is False and engines.check() is False
    assert (engine.version, other.version, said) == ("3", "3", [])
    other.version, before = "default", len(engine.asked)
    assert engines.check() is True
    assert other.version == "3" and "/collective_rpc" not in engine.asked[before:]
    assert said == [f"{other.url} had been started again, and has the weights again"]
    assert engines.check() is False

    other.version = "default"
    assert engines.push(4, Path.mkdir) is True
    assert other.version == "4" and [one.name for one in tmp_path.iterdir()] == ["4"]

    other.root, before = "models/other", len(other.asked)
    for act in (engines.check, lambda: engines.push(5, Path.mkdir)):
        with pytest.raises(EngineLost, match="another model"):
            act()
    assert "/collective_rpc" not in other.asked[before:]


def test_an_engine_that_does_not_tell_what_it_has_is_known_all_the_same(
    engine: StubEngine, other: StubEngine, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer is lost just after a push. When the engine is started again later, that is seen."""
    engines, look = Attached(config, tmp_path), same_model.look
    engines.push(3, Path.mkdir)
    with monkeypatch.context() as patch:
        patch.setattr(same_model, "look", lambda *asked: {engine.url: look(*asked)[engine.url]})
        engines.push(4, Path.mkdir)
    other.version = "default"
    assert engines.check() is True and other.version == "4"


def test_an_engine_that_lost_its_adapter_has_it_again(engine: StubEngine, config: Config, tmp_path: Path) -> None:
    engine.base, said = "base", list[str]()
    alone = replace(config, engine_urls=(engine.url,), model_name="planner", verl={"lora_rank": 1})
    engines = Attached(alone, tmp_path, apart=True, say=said.append)
    engines.push(1, Path.mkdir)
    [folder] = tmp_path.iterdir()
    assert engine.adapters == {"planner": str(folder)} and LOAD in engine.asked
    engine.adapters.clear()
    assert engines.check() is False and engine.adapters == {"planner": str(folder)}
    assert said == [f"the engine at {engine.url} had lost its adapter, and has it again"]


def test_nothing_is_sent_to_engines_that_may_have_no_more(engine: StubEngine, config: Config, tmp_path: Path) -> None:
    def refuse() -> None:
        raise EngineLost("taken over")

    with pytest.raises(EngineLost, match="taken over"):
        Attached(config, tmp_path, permit=refuse).push(1, Path.mkdir)
    assert "/collective_rpc" not in engine.asked


def test_rows_are_as_long_as_engines_serve_them(
    engine: StubEngine, other: StubEngine, config: Config, tmp_path: Path
) -> None:
    engines = Attached(config, tmp_path)
    engine.length, other.length = 4096, 500
    assert engines.longest(128) == 4096
    other.length = 128
    with pytest.raises(ConfigError, match="on both sides of 128"):
        engines.longest(128)
    other.lacks = {"/v1/models"}
    with pytest.raises(EngineLost, match="does not say how long rows may be"):
        engines.longest(128)


def test_a_candidate_is_an_adapter_beside_what_serves(engine: StubEngine, config: Config, tmp_path: Path) -> None:
    """Neither changes what the other has, however often it is pushed."""
    engine.base, said = "base", list[str]()
    both = replace(
        config, engine_urls=(engine.url,), run_dir=str(tmp_path), model_name="planner", candidate="next",
        verl={"actor_rollout_ref.model.lora_rank": 4},
    )  # fmt: skip
    with attached(both, lambda: None, said.append) as engines:
        assert engines is not None and engines.candidate is not None
        engines.push(0, Path.mkdir)
        serves = dict(engine.adapters)
        for version in (1, 2, 1):
            engines.candidate.push(version, Path.mkdir)
        assert engine.adapters["planner"] == serves["planner"] and Path(serves["planner"]).is_dir()
        proposed = engine.adapters["next"]
        engines.push(2, Path.mkdir)
        assert engine.adapters["next"] == proposed and Path(proposed).is_dir()
        del engine.adapters["next"]
        engines.candidate.check()
        assert engine.adapters["next"] == proposed and len(said) == 1


def test_a_candidate_of_whole_weights_has_engines_of_its_own(
    engine: StubEngine, other: StubEngine, config: Config, tmp_path: Path
) -> None:
    other.base = "next"
    both = replace(
        config, engine_urls=(engine.url,), weights_dir=str(tmp_path), candidate="next", candidate_urls=(other.url,)
    )
    with attached(both, lambda: None, pytest.fail) as engines:
        assert engines is not None and engines.candidate is not None
        engines.push(0, Path.mkdir)
        engines.candidate.push(4, lambda folder: folder.mkdir(parents=True))
        assert (engine.version, other.version) == ("0", "4") and (engines.folder / "0").is_dir()


@pytest.mark.parametrize("serves", ["base", "planner"])
def test_a_candidate_that_is_served_otherwise_is_refused(
    engine: StubEngine, other: StubEngine, config: Config, tmp_path: Path, serves: str
) -> None:
    """One of them as an adapter, the other as a model of its own."""
    engine.base, other.base = serves, "next" if serves == "base" else "base"
    both = replace(
        config, engine_urls=(engine.url,), run_dir=str(tmp_path), model_name="planner", candidate="next",
        candidate_urls=(other.url,), verl={"actor_rollout_ref.model.lora_rank": 4},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"^candidate: 'next' is "), attached(both, lambda: None, pytest.fail):
        pytest.fail("it is attached")
