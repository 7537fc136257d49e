"""LoRA: what is pushed to engines is the model with its adapter in it, and not the model that it began with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorkerConfig

from ajet_trainer.backends.verl.compared import dtype_of
from ajet_trainer.backends.verl.weights import SharedFolder, write_adapter
from ajet_trainer.backends.verl.worker import RowWorker
from tests.kit.trainer_process import FLOAT32
from tests.trainer.engine.test_gradient import conversation, rows_of, step_data
from tests.trainer.engine.test_settings import SEED, composed, refused

LORA = {"actor_rollout_ref.model.lora_rank": 4}


def logprobs(worker: Any, data: Any) -> Any:
    with worker.engine.eval_mode():
        return worker.engine.infer_batch(data, loss_function=None)["model_output"]["log_probs"].detach().values()


def adapted(folder: Path, lora: Mapping[str, Any] = LORA, *, apart: Path | None = None, **optim: Any) -> Any:
    """A worker of the trainer's own configuration whose model has an adapter, sent to engines `apart` through a folder
    if there is one."""
    steps = {f"actor_rollout_ref.actor.optim.{name}": value for name, value in optim.items()}
    tree = composed(
        {**lora, **FLOAT32, **steps}, device="cpu", folder=apart, apart=apart is not None, model=str(folder)
    ).actor_rollout_ref
    model, actor = omega_conf_to_dataclass(tree.model), omega_conf_to_dataclass(tree.actor)
    actor.engine.infer_max_token_len_per_gpu = actor.engine.max_token_len_per_gpu = 256
    made = RowWorker(
        TrainingWorkerConfig(
            model_type="language_model", model_config=model, engine_config=actor.engine,
            optimizer_config=actor.optim, checkpoint_config=actor.checkpoint,
        )
    )
    made.reset()
    return made


def served(worker: Any) -> Iterator[tuple[str, Any]]:
    """The tensors that are sent to engines."""
    found, adapter = worker.engine.get_per_tensor_param(base_sync_done=True)
    assert adapter is None
    yield from found


def test_engines_are_served_the_model_with_its_adapter(tiny: Path, tmp_path: Path) -> None:
    made = adapted(tiny)
    data = step_data(rows_of([[conversation(1, turns=3)], [conversation(2, turns=1)]]), [0.0, 0.0])
    with torch.no_grad():
        for name, parameter in made.engine.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    moved = logprobs(made, data)

    writer = SharedFolder(bucket_size=1, is_master=True, folder=str(tmp_path))
    asyncio.run(writer.send_weights(served(made), global_steps=1))
    (tmp_path / "1" / "config.json").write_text((tiny / "config.json").read_text())
    ids = data["input_ids"].unbind()[0]
    said = {}
    for name, folder in (("start", tiny), ("served", tmp_path / "1")):
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids.unsqueeze(0)).logits[0]
        said[name] = found.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    assert (said["served"] - moved[: len(ids) - 1]).abs().max() < 0.05, "pushed in bfloat16"
    assert (said["served"] - said["start"]).abs().max() > 0.2
    assert torch.equal(logprobs(made, data), moved), "and the adapter is still apart here"


def test_an_adapter_starts_where_the_runs_seed_says(tiny: Path, tmp_path: Path) -> None:
    def start(seed: int) -> Any:
        made = adapted(tiny, LORA | {SEED: seed}, apart=tmp_path)
        return torch.cat([one.flatten() for name, one in made.engine.module.named_parameters() if "lora_A" in name])

    first = start(7)
    assert first.std() > 0
    assert torch.equal(first, start(7)) and not torch.equal(first, start(8))


def test_an_adapter_is_always_merged() -> None:
    assert composed(LORA).actor_rollout_ref.model.lora.merge is True
    said = refused({"actor_rollout_ref.model.lora.merge": False})
    assert said.startswith("actor_rollout_ref.model.lora.merge cannot be changed: agents would be served the model")


@pytest.mark.parametrize(
    ("values", "apart", "expected"), [({}, False, "fp32"), (LORA, False, "bf16"), (LORA, True, "fp32")]
)
def test_a_model_with_its_adapter_in_it_is_as_coarse_as_it_is_sent(
    values: Mapping[str, Any], apart: bool, expected: str, tmp_path: Path
) -> None:
    tree = composed({**values, **FLOAT32}, device="cpu", folder=tmp_path, apart=apart)
    assert dtype_of(tree) == expected


def test_what_is_written_is_the_adapter_and_peft_reads_it(tiny: Path, tmp_path: Path) -> None:
    worker = adapted(tiny, LORA | {"actor_rollout_ref.model.lora_alpha": 6}, apart=tmp_path)
    data = step_data(rows_of([[conversation(1, turns=3)], [conversation(2, turns=1)]]), [0.0, 0.0])
    with torch.no_grad():
        for name, parameter in worker.engine.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    trained = logprobs(worker, data)

    write_adapter(worker.engine, tmp_path / "other", master=False)
    assert not (tmp_path / "other").exists()
    write_adapter(worker.engine, folder := tmp_path / "1", master=True)
    assert sorted(one.name for one in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert len({one.stat().st_mode for one in folder.iterdir()}) == 1, "an engine of another user may read both"
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = data["input_ids"].unbind()[0]
    with torch.no_grad():
        found = PeftModel.from_pretrained(plain, str(folder))(ids.unsqueeze(0)).logits[0].log_softmax(-1)
    said = found[torch.arange(len(ids) - 1), ids[1:]]
    assert (said - trained[: len(ids) - 1]).abs().max() < 1e-4
    assert torch.equal(logprobs(worker, data), trained), "and training goes on as before"
