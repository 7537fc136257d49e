"""A checkpoint becomes a folder that transformers reads; that vLLM serves it alike is `tests/e2e/training`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ajet_trainer.backends.verl import export, trainer
from ajet_trainer.backends.verl.learner import VerlLearner
from ajet_trainer.cli import cli
from tests.kit.learner import training_worker
from tests.kit.tiny_model import build
from tests.trainer.engine import test_adapters
from tests.trainer.engine.saving import save
from tests.trainer.engine.test_adapters import LORA, logprobs
from tests.trainer.engine.test_gradient import conversation, rows_of, step_data
from tests.trainer.engine.test_settings import composed
from tests.trainer.test_cli import status

STORY = [{"role": "user", "content": "say hello"}, {"role": "assistant", "content": "hello\n\n"}]


def weights(folder: Path) -> dict[str, Any]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in bfloat16, as models usually come."""
    folder = build(tmp_path_factory.mktemp("models") / "half")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(half: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with whole checkpoints of steps 2 and 4, whose weights are 1.5 and 3 times the model's, and half of 5."""
    folder, worker = tmp_path_factory.mktemp("run"), training_worker(half)
    for step, factor in ((2, 1.5), (4, 2.0)):
        save(worker, folder / "checkpoints" / f"global_step_{step}", factor, "bfloat16")
    (folder / "checkpoints" / "global_step_5" / "actor").mkdir(parents=True)
    return folder


Said = Callable[..., str]


@pytest.fixture
def exported(capsys: pytest.CaptureFixture[str]) -> Said:
    """The lines that `export` says on its way with these words."""

    def said(*words: str | Path) -> str:
        assert status("export", *map(str, words)) == 0
        return capsys.readouterr().out

    return said


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Said:
    """The one line in which `export` refuses these words, or fails with them."""

    def said(*words: str | Path, code: int = 2) -> str:
        assert status("export", *map(str, words)) == code
        captured = capsys.readouterr()
        assert (captured.out == "" or code == 1) and captured.err.count("\n") == 1
        return captured.err.removeprefix("ajet-trainer: ").strip()

    return said


def test_a_model_that_verl_saved_besides_is_not_what_is_exported(
    run: Path, half: Path, tmp_path: Path, exported: Said
) -> None:
    """`save_contents` may name hf_model: verl writes it, in fp32 and with adapters apart, beside the tokenizer."""
    own = run / "checkpoints" / "global_step_2" / "actor" / "huggingface"
    others = [own / name for name in ("model.safetensors", "model-00001-of-00002.safetensors",
                                      "model.safetensors.index.json", "pytorch_model.bin")]  # fmt: skip
    try:
        for path in others:
            path.write_bytes(b"another model")
        exported(run, tmp_path / "out", "--step", "2")
    finally:
        for path in others:
            path.unlink()
    assert [path.name for path in (tmp_path / "out").iterdir() if "model" in path.name] == ["model.safetensors"]
    before, after = weights(half), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all((after[name] == (before[name].float() * 1.5).bfloat16()).all() for name in after)


def test_the_latest_checkpoint_in_the_models_own_dtype(run: Path, half: Path, tmp_path: Path, exported: Said) -> None:
    out = tmp_path / "models" / "trained"
    assert exported(run, out).splitlines() == [
        f"reading {run}/checkpoints/global_step_4", "writing 26 tensors in bfloat16", f"exported to {out}",
    ]  # fmt: skip
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "who may read one file may read all"
    before, after = weights(half), weights(out)
    assert before.keys() == after.keys()
    assert all(after[name].dtype == torch.bfloat16 for name in after)
    assert all(torch.equal(after[name], (before[name].float() * 3).bfloat16()) for name in after)
    assert after["lm_head.weight"].data_ptr() == after["model.embed_tokens.weight"].data_ptr(), "still one tensor"
    assert {**described(out), "transformers_version": 0} == {**described(half), "transformers_version": 0}
    kept = [AutoTokenizer.from_pretrained(folder) for folder in (half, out)]
    assert len({tokenizer.apply_chat_template(STORY, tokenize=False) for tokenizer in kept}) == 1
    assert [tokenizer.decode(tokenizer.encode("say hello\n")) for tokenizer in kept] == ["say hello\n"] * 2


def described(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_another_step_of_a_folder_of_checkpoints(run: Path, half: Path, tmp_path: Path, exported: Said) -> None:
    (tmp_path / "out").mkdir()
    exported(run / "checkpoints", "--step", "2", tmp_path / "out")
    before, after = weights(half), weights(tmp_path / "out")
    assert all(torch.equal(after[name], (before[name].float() * 1.5).bfloat16()) for name in after)


def test_a_large_model_is_written_in_pieces(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: Said
) -> None:
    exported(run, tmp_path / "one")
    monkeypatch.setattr(export, "PIECE", "200KB")
    exported(run, tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_what_two_processes_wrote_is_one_model(two: Path, tiny: Path, tmp_path: Path, exported: Said) -> None:
    assert len(list(two.rglob("actor/model_world_size_2_rank_*.pt"))) == 2
    exported(two, tmp_path / "out")
    before, after = weights(tiny), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name] * 1.5) for name in after)


@pytest.fixture(scope="module")
def adapted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A worker with an adapter that has moved, and its run."""
    made = test_adapters.adapted(tiny, LORA | {"actor_rollout_ref.model.lora_alpha": 6})
    with torch.no_grad():
        for name, parameter in made.engine.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    folder = tmp_path_factory.mktemp("adapted")
    save(made, folder / "checkpoints" / "global_step_1")
    return made, folder


def test_an_adapter_is_merged_into_the_model(
    adapted: tuple[Any, Path], tiny: Path, tmp_path: Path, exported: Said
) -> None:
    """The folder says what the trainer's weights say with the adapter on."""
    worker, run = adapted
    data = step_data(rows_of([[conversation(1, turns=3)], [conversation(2, turns=1)]]), [0.0, 0.0])
    moved = logprobs(worker, data)
    exported(run, tmp_path / "out")
    ids = data["input_ids"].unbind()[0]
    said = {}
    for name, folder in (("start", tiny), ("exported", tmp_path / "out")):
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids.unsqueeze(0)).logits[0]
        said[name] = found.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    assert (said["exported"] - moved[: len(ids) - 1]).abs().max() < 1e-4
    assert (said["start"] - moved[: len(ids) - 1]).abs().max() > 0.1
    assert weights(tmp_path / "out").keys() == weights(tiny).keys()


def edited(run: Path, out: Path, change: Any) -> Path:
    """A copy of a run whose tensors are changed."""
    shutil.copytree(run, out)
    file = next(out.rglob("model_world_size_1_rank_0.pt"))
    tensors = torch.load(file, weights_only=True)
    change(tensors)
    torch.save(tensors, file)
    return out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kept: kept.pop("base_model.model.model.norm.weight"), "the checkpoint lacks model.norm.weight"),
        (lambda kept: kept.update(value_head=kept["base_model.model.model.norm.weight"]),
         "the checkpoint has value_head"),
        (lambda kept: kept.update({"x.lora_embedding_A": kept["base_model.model.model.norm.weight"]}),
         "the adapter's x.lora_embedding_A cannot be merged into the model"),
    ],
)  # fmt: skip
def test_what_is_no_whole_model_is_not_written(
    adapted: tuple[Any, Path], tmp_path: Path, change: Any, said: str, refused: Said
) -> None:
    run = edited(adapted[1], tmp_path / "run", change)
    assert refused(run, tmp_path / "out", code=1).startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported_is_said_with_what_can(run: Path, tmp_path: Path, refused: Said) -> None:
    out, checkpoints = tmp_path / "out", run / "checkpoints"
    said = f"; {checkpoints} has steps 2, 4"
    assert refused(run, out, "--step", "3") == f"there is no checkpoint of step 3{said}"
    assert refused(run, out, "--step", "5") == f"the checkpoint of step 5 is not whole{said}"
    assert refused(tmp_path, out) == (
        f"no whole checkpoint is in {tmp_path}: is {tmp_path} the run_dir of a run that has saved one?"
    )
    out.mkdir()
    (out / "mine").touch()
    assert refused(run, out) == f"{out} is not empty: name one that does not exist yet"
    assert refused(run, out / "mine") == f"{out}/mine is not empty: name one that does not exist yet"
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_a_killed_export_leaves_no_folder_and_the_next_removes_the_rest(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: Said
) -> None:
    out, rest = tmp_path / "out", tmp_path / ".out.unfinished"
    monkeypatch.setattr(export.Export, "write", lambda self, folder: (folder / "model.safetensors").touch() or 1 / 0)
    monkeypatch.setattr(export.shutil, "rmtree", lambda *_, **__: None)  # as if killed before
    with pytest.raises(ZeroDivisionError):
        cli.main(["export", str(run), str(out)], standalone_mode=False)
    assert not out.exists() and [path.name for path in rest.iterdir()] == ["model.safetensors"]
    monkeypatch.undo()
    (rest / "old").touch()
    exported(run, out)
    assert not rest.exists() and not (out / "old").exists()


def test_a_disk_that_takes_no_model_is_one_line(run: Path, tmp_path: Path, refused: Said) -> None:
    (tmp_path / "file").touch()
    said = refused(run, tmp_path / "file" / "out", code=1)
    assert said.startswith(f"cannot export {run}/checkpoints/global_step_4 to {tmp_path}/file/out: ")


def test_other_engines_are_named_with_what_exports_them(run: Path, tmp_path: Path, refused: Said) -> None:
    copied = edited(run, tmp_path / "run", lambda kept: None)
    for path in copied.rglob("fsdp_config.json"):
        path.unlink()
    said = refused(copied, tmp_path / "out", code=1)
    assert "was not written by fsdp: `python -m verl.model_merger` knows other engines" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["NoSuchModel"]}, "transformers has no model of the kind ['NoSuchModel']"),
        ({"model_type": "no_such_type", "architectures": []}, "no_such_type"),
    ],
)
def test_a_model_that_transformers_does_not_have_is_one_line(
    run: Path, tmp_path: Path, change: Any, said: str, refused: Said
) -> None:
    copied = edited(run, tmp_path / "run", lambda kept: None)
    for path in copied.rglob("config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert said in refused(copied, tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("model", "dtype"), [("half", "bfloat16"), ("tiny", "float32")])
def test_a_checkpoint_names_the_dtype_of_the_model_that_the_run_began_with(
    model: str, dtype: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    made = trainer.AjetTrainer.__new__(trainer.AjetTrainer)
    made.config = composed({}, model=str(request.getfixturevalue(model)), run_dir=str(tmp_path))
    made.ours, made.train_dataloader = SimpleNamespace(keep_checkpoints=2), trainer.Leases()
    made._save_checkpoint = Path(made.config.trainer.default_local_dir).mkdir
    made._init_tokenizer()
    VerlLearner(made, None, pytest.fail).save({"saved": []})
    assert made.train_dataloader.state_dict() == {"saved": [], "dtype": dtype}
