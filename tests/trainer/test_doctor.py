"""The trainer's doctor: what is wrong with a host is said in words, and nothing is loaded for it."""

from __future__ import annotations

import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ajet_sdk.findings import Finding
from ajet_trainer import doctor
from ajet_trainer.cli import cli
from ajet_trainer.config import Config
from tests.kit.ports import free_port
from tests.trainer.stub_engine import StubEngine

BILLION = 1_000_000_000
NOWHERE = f"http://127.0.0.1:{free_port()}"


def folder(path: Path, size: int = BILLION) -> Path:
    """A model of `size` parameters, as far as it is looked at."""
    path.mkdir()
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [size // 2, 2]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (path / "config.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    (path / "chat_template.jinja").write_text("x")
    return path


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(model=str(folder(tmp_path / "m")), run_dir=str(tmp_path / "run"), proxy_url=NOWHERE)


def of(config: Config, check: str) -> list[Finding]:
    return [found for found in doctor.examine(config) if found.check == check]


def only(config: Config, check: str) -> Finding:
    [found] = of(config, check)
    return found


def test_a_model_is_counted_without_being_read(config: Config) -> None:
    whole = Path(config.model) / "model.safetensors"
    whole.with_name("consolidated.safetensors").write_bytes(whole.read_bytes())  # the same weights, for another library
    assert only(config, "model").message.endswith("1.00 billion parameters")
    assert not of(config, "chat template")


@pytest.mark.parametrize(("lacks", "check", "said"), [
    ("config.json", "model", "no configuration"), ("tokenizer_config.json", "model", "no tokenizer"),
    ("model.safetensors", "model", "no weights"), ("chat_template.jinja", "chat template", "has none"),
])  # fmt: skip
def test_what_a_model_folder_lacks_is_named(config: Config, lacks: str, check: str, said: str) -> None:
    (Path(config.model) / lacks).unlink()
    found = only(config, check)
    assert said in found.message and found.advice and found.level == ("fault" if check == "model" else "warning")


@pytest.mark.parametrize("content", [
    b"version https://git-lfs.github.com/spec/v1\nsize 12345\n", b"", struct.pack("<Q", 6) + b'{"a": {"shape"',
])  # fmt: skip
def test_a_file_that_holds_no_weights_is_named(config: Config, content: bytes) -> None:
    """A pointer of git LFS, and a download that was cut short."""
    (path := Path(config.model) / "model.safetensors").write_bytes(content)
    found = only(config, "model")
    assert (found.level, found.message) == ("fault", f"{path} holds no weights") and found.advice


@pytest.mark.parametrize(("model", "given", "level", "said"), [
    ("org/name", "a path", "warning", "org/name is a hub's"), ("org/name", OSError(), "fault", "there is no folder"),
    ("org/name", ValueError(), "fault", "no hub or its cache gives 'org/name'"),
    ("a/path/of/one", "a path", "fault", "there is no folder"),
])  # fmt: skip
def test_a_folder_that_is_not_there_is_asked_of_the_hub(
    config: Config, monkeypatch: pytest.MonkeyPatch, model: str, given: str | Exception, level: str, said: str
) -> None:
    def download(name: str, file: str) -> str:
        assert (name, file) == (model, "config.json")
        if isinstance(given, Exception):
            raise given
        return given

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    found = only(replace(config, model=model), "model")
    assert (found.level, found.advice) == (level, "give model the path of a folder") and said in found.message


@pytest.mark.parametrize(("free", "verl", "check", "level"), [
    ([], {}, "memory", "fault"), ([], {"actor_rollout_ref.model.lora_rank": 8}, "memory", "ok"),
    ([15], {}, "GPU memory", "fault"), ([17], {}, "GPU memory", "ok"),
    ([9, 9], {"trainer.n_gpus_per_node": 2}, "GPU memory", "ok"),
    ([9], {"trainer.n_gpus_per_node": 2}, "GPU memory", "fault"),
    ([9, 7], {"trainer.n_gpus_per_node": 2}, "GPU memory", "fault"),
    ([17], {"trainer.device": "cpu"}, "memory", "fault"),
    ([], {"trainer.device": "cuda"}, "GPU memory", "fault"),
])  # fmt: skip
def test_memory_is_held_against_what_is_trained(
    config: Config, monkeypatch: pytest.MonkeyPatch, free: list[int], verl: dict[str, Any], check: str, level: str
) -> None:
    """16 bytes a parameter, and 4 with an adapter; of a GPU its share."""
    monkeypatch.setattr(doctor, "gpus", lambda: [(one * BILLION, 80 * BILLION) for one in free])
    monkeypatch.setattr(doctor, "memory", lambda kind: 10 * BILLION)
    found = only(replace(config, engine_urls=(NOWHERE,), verl=verl), check)
    assert found.level == level and bool(found.advice) == (level == "fault")


@pytest.mark.parametrize(("verl", "beside", "check", "said"), [
    ({"trainer.device": "cpu"}, 0, "memory", "moments and an engine take 20.0 GB"),
    ({"trainer.device": "cpu"}, 5e9, "memory", "take 25.0 GB"), ({}, 0, "GPU memory", "take 56.0 GB"),
    ({doctor.SHARE: "${x}", "trainer.n_gpus_per_node": "${y}"}, 0, "GPU memory", "on each of 1 take 56.0 GB"),
    ({doctor.SHARE: 0.3, "trainer.nnodes": 2}, 5e9, "GPU memory", "on each of 1 take 37.0 GB"),
    ({}, 5e9, "disk", "3 checkpoints take 41.0 GB"),
])  # fmt: skip
def test_an_engine_that_is_launched_and_what_runs_beside_need_room_too(
    config: Config, monkeypatch: pytest.MonkeyPatch, verl: dict[str, Any], beside: float, check: str, said: str
) -> None:
    """On a CPU 4 bytes a parameter; of a GPU the share that verl gives it."""
    monkeypatch.setattr(doctor, "gpus", lambda: [(BILLION, 80 * BILLION)])
    [found] = [one for one in doctor.room(replace(config, verl=verl), beside) if one.check == check]
    assert said in found.message


def test_gpus_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ASK", "print(1, 2, 3, 4)")
    assert doctor.gpus() == [(1, 2), (3, 4)]
    for asked in ("print()", "import a_module_that_is_not_there"):
        monkeypatch.setattr(doctor, "ASK", asked)
        assert doctor.gpus() == []


def test_a_run_folder_below_a_file_is_a_fault(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = only(replace(config, run_dir=str(tmp_path / "file" / "run")), "run_dir")
    assert (found.level, found.message) == ("fault", f"{tmp_path}/file cannot be written")


def test_memory_that_the_system_does_not_tell_is_no_fault(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.memory("MemTotal") and doctor.memory("No") is None
    monkeypatch.setattr(doctor, "memory", lambda kind: None)
    assert only(config, "memory").level == "ok"


def test_weights_on_their_way_need_room(config: Config, engine: StubEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 3 * BILLION

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    attached = replace(config, engine_urls=(engine.url,))
    found = only(attached, "weights")
    assert found.level == "fault" and "take 8.0 GB" in found.message and "3.0 GB are free" in found.message
    engine.dtype = "torch.bfloat16"
    assert "take 4.0 GB" in only(attached, "weights").message
    assert only(attached, "disk").message.startswith("3 checkpoints take 36.0 GB")
    assert not of(replace(attached, verl={"actor_rollout_ref.model.lora_rank": 8}), "weights")


def test_proxy_and_engines_are_asked(config: Config, engine: StubEngine) -> None:
    gone = replace(config, engine_urls=(engine.url, NOWHERE))
    assert only(gone, "proxy").level == "fault" and "ajet-proxy serve" in only(gone, "proxy").advice
    assert [found.level for found in of(gone, "engine")] == ["ok", "fault"]
    engine.status["/ajet/v1/status"] = 404
    assert f"(process {os.getpid()}) listens on port" in only(replace(gone, proxy_url=engine.url), "proxy").message
    engine.lacks.add("/is_paused")
    assert "VLLM_SERVER_DEV_MODE=1" in only(gone, "engine").advice


def test_so_are_the_engines_of_a_candidate(config: Config, engine: StubEngine) -> None:
    own = replace(config, engine_urls=(engine.url,), candidate="next", candidate_urls=(NOWHERE,))
    assert "or set candidate_urls" in only(own, "candidate's engine").advice
    beside = replace(own, candidate_urls=(engine.url,))
    assert "serves no model by the name 'next'" in only(beside, "candidate's engine").message
    assert not of(replace(own, candidate_urls=()), "candidate's engine")


def test_the_command_ends_with_1_if_there_is_a_fault(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[trainer]\nmodel = "{config.model}"\nproxy_url = "{NOWHERE}"\nrun_dir = "{config.run_dir}"\n')
    done = CliRunner().invoke(cli, ["doctor", "--config", str(path)])
    assert done.exit_code == 1 and "fault   proxy: " in done.output and "        → " in done.output
    told = json.loads(CliRunner().invoke(cli, ["doctor", "--config", str(path), "--json"]).output)
    assert told["ok"] is False and not (tmp_path / "run").exists()
