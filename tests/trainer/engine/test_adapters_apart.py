"""An adapter alone: what is written, and what engines that hold several are told, in good days and bad ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.settings import ConfigError
from ajet_trainer.config import Config
from tests.kit.http_server import started
from tests.kit.ports import free_port
from tests.trainer.engine.test_adapters import LORA, adapted, logprobs
from tests.trainer.engine.test_gradient import conversation, rows_of, step_data

UNLOAD, LOAD = "/v1/unload_lora_adapter", "/v1/load_lora_adapter"
RANK = "LoRA rank 16 is greater than max_lora_rank 8."


class Holder:
    """A vLLM that holds adapters under names, as far as a trainer can see: `adapters` are their folders. `lacks` are
    routes that it has not, `refuses` those folders it does not take; before each request it lets `watch` look."""

    def __init__(self) -> None:
        self.base = "base"
        self.asked: list[str] = []
        self.adapters: dict[str, str] = {}
        self.lacks: set[str] = set()
        self.refuses: Callable[[str], bool] = lambda folder: False
        self.frozen = False
        self.key = ""
        self.watch: Callable[[], None] = lambda: None
        holder = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
                holder.watch()
                opened = not holder.key or self.headers.get("authorization") == f"Bearer {holder.key}"
                status, answer = holder.answer(self.path, body) if opened else (401, {"error": "Unauthorized"})
                told = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            do_GET = do_POST  # noqa: N815

        self.server, self.url = started(Handler)

    def answer(self, path: str, body: dict[str, str]) -> tuple[int, Any]:
        self.asked.append(path)
        if path in self.lacks:
            return 404, {"detail": "Not Found"}
        if path == "/is_paused":
            return 200, {"is_paused": self.frozen}
        if path == "/v1/models":
            adapters = [{"id": name, "root": root, "parent": "base"} for name, root in self.adapters.items()]
            return 200, {"data": [{"id": self.base, "root": "m", "parent": None}, *adapters]}
        assert path in (LOAD, UNLOAD), "nothing that concerns the whole engine"
        if "lora_name" not in body or (path == LOAD and body["lora_name"] in self.adapters):
            return 400, {"error": {"message": "no"}}
        if path == UNLOAD:
            del self.adapters[body["lora_name"]]
        elif self.refuses(body["lora_path"]):
            return 500, {"error": {"message": RANK}}
        else:
            self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, "done"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def engine() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.close()


@pytest.fixture
def config(engine: Holder, tmp_path: Path) -> Config:
    return Config(model="m", model_name="planner", engine_urls=(engine.url,), verl=dict(LORA), run_dir=str(tmp_path))


def made(home: Path, version: int) -> Path:
    """The folder of an adapter that was written whole."""
    from ajet_trainer.backends.verl import adapters

    written = adapters.begin(home, version)
    written.mkdir(parents=True)
    return adapters.finish(written)


def test_what_is_written_is_the_adapter_and_peft_reads_it(tiny: Path, tmp_path: Path, verl_here: None) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from ajet_trainer.backends.verl import adapters

    worker = adapted(tiny, LORA | {"actor_rollout_ref.model.lora_alpha": 6}, apart=tmp_path)
    data = step_data(rows_of([[conversation(1, turns=3)], [conversation(2, turns=1)]]), [0.0, 0.0])
    with torch.no_grad():
        for name, parameter in worker.engine.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    trained = logprobs(worker, data)

    adapters.write(worker.engine, tmp_path / "other", master=False)
    assert not (tmp_path / "other").exists()
    adapters.write(worker.engine, folder := tmp_path / "1", master=True)
    assert sorted(one.name for one in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert len({one.stat().st_mode for one in folder.iterdir()}) == 1, "an engine of another user may read both"
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = data["input_ids"].unbind()[0]
    with torch.no_grad():
        found = PeftModel.from_pretrained(plain, str(folder))(ids.unsqueeze(0)).logits[0].log_softmax(-1)
    said = found[torch.arange(len(ids) - 1), ids[1:]]
    assert (said - trained[: len(ids) - 1]).abs().max() < 1e-4
    assert torch.equal(logprobs(worker, data), trained), "and training goes on as before"


def test_an_adapter_is_loaded_under_its_name_and_nothing_else_changes(engine: Holder, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl import adapters

    engine.adapters["coder"] = "theirs"
    for version in (0, 1):
        engine.asked.clear()
        adapters.load_into([engine.url], "planner", folder := made(tmp_path, version))
        assert engine.adapters == {"coder": "theirs", "planner": str(folder)}
        assert engine.asked == ["/is_paused", "/v1/models", *[UNLOAD] * version, LOAD]


def test_each_push_is_in_a_folder_of_its_own_even_at_the_same_version(tmp_path: Path) -> None:
    """vLLM tells by name and folder what it has computed. A resumed run may train a version once more, otherwise."""
    assert made(tmp_path, 3) != made(tmp_path, 3)


def test_an_engine_that_refuses_the_adapter_answers_as_before(engine: Holder, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl import adapters
    from ajet_trainer.engines import EngineLost

    other = Holder()
    old, new = made(tmp_path, 1), made(tmp_path, 2)
    adapters.load_into([engine.url, other.url], "planner", old)
    engine.refuses = lambda folder: folder == str(new)
    with pytest.raises(EngineLost, match=rf"{engine.url} did not take the adapter: HTTP 500 from {LOAD}: .*rank 16 is"):
        adapters.load_into([engine.url, other.url], "planner", new)
    assert engine.adapters == {"planner": str(old)} and other.adapters == {"planner": str(new)}
    other.close()


def test_an_engine_that_has_neither_adapter_is_said_to_have_none(engine: Holder, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl import adapters
    from ajet_trainer.engines import EngineLost

    adapters.load_into([engine.url], "planner", made(tmp_path, 1))
    engine.refuses = lambda folder: True
    with pytest.raises(EngineLost, match=r"; nor has it the old one again \(HTTP 500 .*\): the next start"):
        adapters.load_into([engine.url], "planner", made(tmp_path, 2), 1.0)
    assert engine.adapters == {}


def test_the_engines_key_is_the_trainers_too(engine: Holder, config: Config, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl import adapters
    from ajet_trainer.engines import EngineLost

    engine.key = "sesame"
    with pytest.raises(EngineLost, match=r"HTTP 401 from /v1/models: .* set AJET_UPSTREAM_KEY for the trainer"):
        adapters.apart(config)
    assert adapters.apart(replace(config, engine_key="sesame")) is True
    adapters.load_into([engine.url], "planner", folder := made(tmp_path, 1), key="sesame")
    engine.adapters.clear()
    assert adapters.heal([engine.url], "planner", folder, "sesame") == [engine.url]


def test_a_frozen_engine_keeps_its_adapter(engine: Holder, tmp_path: Path) -> None:
    """Its calls in flight would go on with the old adapter, and count as the new version's."""
    from ajet_trainer.backends.verl import adapters
    from ajet_trainer.engines import EngineLost

    engine.frozen, engine.adapters["planner"] = True, "old"
    with pytest.raises(EngineLost, match=r"is frozen, .* gate_mode = drain"):
        adapters.load_into([engine.url], "planner", made(tmp_path, 1))
    assert engine.adapters == {"planner": "old"}
    engine.lacks, engine.frozen = {"/is_paused"}, False
    adapters.load_into([engine.url], "planner", made(tmp_path, 2))


def test_the_names_say_whether_an_adapter_goes_alone(engine: Holder, config: Config) -> None:
    from ajet_trainer.backends.verl import adapters

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
    other = Holder()
    other.base = "planner"
    said = f"engine_urls: 'planner' is the model of {other.url} itself, and an adapter of the others"
    with pytest.raises(ConfigError, match=said):
        adapters.apart(replace(config, engine_urls=(engine.url, other.url)))
    other.close()


def test_an_engine_that_takes_no_adapters_is_refused_before_anything_starts(engine: Holder, config: Config) -> None:
    from ajet_trainer.backends.verl import adapters
    from ajet_trainer.engines import EngineLost

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


def test_an_engine_that_was_started_again_gets_its_adapter_again(engine: Holder, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl import adapters

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
    engine: Holder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may read the adapters that it was told of at any time, and ends if one is gone. The next start goes on."""
    from ajet_trainer.backends.verl import adapters

    steps = ("begin", "mkdir", "finish", "_folder_of", "ask", "ask", "forget", "end")
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
    for name in ("begin", "finish", "_folder_of", "ask", "forget"):
        monkeypatch.setattr(adapters, name, instant(name, getattr(adapters, name)))
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


def test_the_folder_of_adapters_outlives_the_run(config: Config, tmp_path: Path) -> None:
    from ajet_trainer.backends.verl.main import weights_folder

    with weights_folder(config, apart=True) as folder:
        assert folder == tmp_path / "adapters"
        (folder / "1").mkdir()
    with weights_folder(config, apart=True) as again:
        assert again == folder and (folder / "1").exists()
    with weights_folder(replace(config, weights_dir=str(tmp_path / "shared")), apart=True) as shared:
        assert shared is not None and shared.parent == tmp_path / "shared"
    assert shared.is_dir()
