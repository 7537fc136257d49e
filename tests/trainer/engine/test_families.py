"""Each family of models is right packed, or padded, or refused by name. `every_family` tries all; here are some."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl.utils import tensordict_utils as tu

from ajet_trainer.backends.verl.micro_batches import batch_of, side_by_side
from tests.kit.families import families, logprobs, save, small
from tests.kit.learner import training_worker
from tests.trainer.engine.every_family import check, look_at
from tests.trainer.engine.test_estimators import group, padding
from tests.trainer.engine.test_gradient import FULL, close, conversation, gradient, rows_of, step_data
from tests.trainer.engine.test_settings import ACTOR, composed, refused
from tests.trainer.engine.whole_step import Steps

SOME = ["afmoe", "glm_moe_dsa", "lfm2", "llama", "llama4_text", "minimax", "mixtral", "qwen3_5_text"]
MODEL, PACKING = "actor_rollout_ref.model", "use_remove_padding"


def described(folder: Path, family: str, **more: Any) -> str:
    """The folder of a model of `family` that has a configuration and nothing else."""
    small(families()[family][0]).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return str(folder)


@pytest.mark.parametrize("family", SOME)
def test_a_family_is_right_as_it_is_computed_or_refused(family: str, tmp_path: Path) -> None:
    check(family, look_at(family, tmp_path / family))


def test_rows_that_would_read_each_other_are_padded(tmp_path: Path) -> None:
    folder = described(tmp_path, "qwen3_next")
    for device in ("cpu", "cuda"):
        tree = composed({}, model=folder, device=device)
        assert tree.actor_rollout_ref.model[PACKING] is tree.critic.model[PACKING] is False
        said = composed({f"{MODEL}.{PACKING}": True}, model=folder, device=device)
        assert said.actor_rollout_ref.model[PACKING] is True, "who says so is told by a look at the rows"
    assert composed({"model_engine": "megatron"}, model=folder).actor_rollout_ref.model[PACKING] is True
    assert "sliding_window" not in refused({}, model=folder, rows="tree")
    assert "does not compute trees" in refused({}, model=folder, rows="tree")


def test_other_rows_are_packed(tiny: Path, tmp_path: Path) -> None:
    for model in (str(tiny), str(tmp_path / "nothing")):
        tree = composed({}, model=model)
        assert tree.actor_rollout_ref.model[PACKING] is tree.critic.model[PACKING] is True
    own = described(tmp_path, "qwen2", auto_map={"AutoModelForCausalLM": "own.Model"})
    assert composed({}, model=own).actor_rollout_ref.model[PACKING] is False


@pytest.mark.parametrize("part", [ACTOR, f"{ACTOR}.fsdp_config"])
def test_padded_rows_are_not_shared_among_processes(part: str, tmp_path: Path) -> None:
    key = f"{part}.ulysses_sequence_parallel_size"
    said = refused({key: 2, "trainer.n_gpus_per_node": 2}, model=described(tmp_path, "qwen3_next"))
    assert said.startswith(f"{key} shares packed rows among processes, and those of qwen3_next are padded")


@pytest.mark.parametrize("family", ["doge", "glm_moe_dsa", "paligemma", "phimoe"])
def test_families_that_are_refused_by_name(family: str, tmp_path: Path) -> None:
    said = refused({}, model=described(tmp_path, family))
    assert said.startswith("model = ") and f"({family}) cannot be trained: it " in said


def test_whoever_chooses_among_tokens_is_refused(tmp_path: Path) -> None:
    said = refused({}, model=described(tmp_path, "deepseek_v3", index_topk=8))
    assert "(deepseek_v3) cannot be trained: it chooses what a token attends to" in said


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A worker whose model carries a state."""
    kind, made = families()["qwen3_5_text"]
    folder = save(tmp_path_factory.mktemp("recurrent"), kind, made, "sdpa", {"vocab_size": 500})
    return training_worker(folder, packed=False, tokenizer=False)


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean-token-mean"])
def test_padded_rows_have_the_gradient_of_each_alone(padded: Any, mean: str) -> None:
    """The policy, KL and entropy terms together. A row alone has no padding and no neighbour."""
    rows, advantages = rows_of([[conversation(seed, turns=1 + 2 * seed)] for seed in range(4)]), [1.0, 0.2, -1.2, 0.4]
    longest = max(row.tokens for row in rows)
    told = partial(step_data, rows, advantages, mean=mean, packed=False)
    one, alone = (gradient(padded, told(pack=pack), loss_agg_mode=mean, **FULL) for pack in (1000, longest))
    assert np.linalg.norm(one) > 0 and close(one, alone) < 1e-5
    packed = gradient(padded, step_data(rows, advantages, mean=mean), loss_agg_mode=mean, **FULL)
    assert close(one, packed) > 1e-3, "as it would be otherwise"
    assert padded.wrong(2048) == ""


def test_a_whole_step_with_padded_rows(padded: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From rows to a gradient through `AjetTrainer`, with episodes that have split, and with padding of verl's."""
    monkeypatch.setattr("tests.trainer.engine.whole_step.step_data", partial(step_data, packed=False))
    steps = Steps(tiny, padded, "grpo")
    whole, split = group(False), [*group(True), padding(0), padding(1)]
    one, other = steps.gradient(whole), steps.gradient(split)
    assert np.isfinite(one).all() and close(one, other) < 1e-5


def test_micro_batches_count_padding() -> None:
    lengths = [900, *[10] * 60, 500, 30]
    parts = side_by_side(lengths, 1000, lambda count: count)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[place] for place in part) <= 1000 for part in parts) and len(parts) == 3
    more = side_by_side(lengths, 1000, lambda count: count + 5)
    assert len(more) == 8 and sorted(place for part in more for place in part) == list(range(len(lengths)))
    assert side_by_side([50, 40], 30, lambda count: count) == [[0], [1]]


def test_a_padded_workers_logprobs_are_in_the_rows_order(padded: Any) -> None:
    pick, sizes = torch.Generator().manual_seed(3), []
    rows = [torch.randint(3, 500, (length,), generator=pick) for length in (9, 120, 30, 60, 118, 5)]
    theirs = padded.engine.prepare_model_inputs

    def seen(micro_batch: Any) -> Any:
        inputs, more = theirs(micro_batch)
        sizes.append(tuple(inputs["input_ids"].shape))
        return inputs, more

    padded.engine.prepare_model_inputs = seen
    try:
        with padded.engine.eval_mode():
            data = batch_of([(row[:1], row[1:]) for row in rows], packed=False)
            tu.assign_non_tensor(data, max_token_len_per_gpu=250)
            found = padded.engine.infer_batch(data)["model_output"]["log_probs"].unbind()
    finally:
        padded.engine.prepare_model_inputs = theirs
    assert len(sizes) == 2 and all(count * longest <= 250 for count, longest in sizes)
    for row, one in zip(rows, found, strict=True):
        assert float((one[:-1] - logprobs(padded, [row], packed=False)[0]).abs().max()) < 1e-4
