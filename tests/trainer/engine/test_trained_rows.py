"""The rows of a step are kept as verl trained them, and their tokens are shown as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ajet_trainer.backends.verl import rows as queue
from ajet_trainer.batch import Row, to_row
from ajet_trainer.config import Config
from ajet_trainer.trained_rows import TrainedRow, read, write
from tests.kit.learner import verl_learner
from tests.kit.tiny_model import build_tokenizer
from tests.trainer.engine.test_estimators import MemoryQueue, group, stored
from tests.trainer.engine.test_settings import composed
from tests.trainer.making import sample
from tests.trainer.test_cli import status
from tests.trainer.test_trained_rows import trained


def keep(model: Path, run_dir: Path, rows: list[Row], memory: dict[str, Any], say: Callable[[str], None]) -> None:
    """A `VerlLearner` after three steps keeps `rows`, of which TransferQueue has `memory`."""
    ours = Config(model=str(model), run_dir=str(run_dir))
    with patch.object(queue, "tq", MemoryQueue(memory)):
        verl_learner(composed({}, model=str(model)), say=say, ours=ours, global_steps=3)._keep(rows, "train")


@pytest.mark.parametrize("split", [False, True], ids=["one row an episode", "episodes that split"])
def test_what_is_kept_is_what_verls_worker_gets(tiny: Path, tmp_path: Path, split: bool) -> None:
    rows = group(split)
    memory = stored(tiny, rows, adv_estimator="grpo", mode="seq-mean-token-mean")
    keep(tiny, tmp_path, rows, memory, pytest.fail)
    found, model = read(tmp_path, 3)
    assert model == str(tiny) and len(found) == len(rows)
    for row, one in zip(rows, found, strict=True):
        fields, sampled = memory[row.key], row.mask == 1
        assert one.row.response.tolist() == row.response.tolist()
        assert one.mask.tolist() == fields["response_mask"].tolist()
        for name, kept in (("old_log_probs", one.trainer), ("advantages", one.advantage)):
            assert np.array_equal(kept[sampled], fields[name].numpy()[sampled].astype(np.float32))
        assert (one.weight is not None) == split, "rows of an episode that split share its weight"
        if one.weight is not None:
            assert np.allclose(one.weight[sampled], fields["rollout_is_weights"].numpy()[sampled])


def test_a_disk_that_takes_no_rows_ends_no_step(tiny: Path, tmp_path: Path) -> None:
    rows, said = group(False), list[str]()
    keep(tiny, tmp_path / "gone", rows, stored(tiny, rows), said.append)
    assert len(said) == 1 and said[0].startswith("the rows of step 3 are not kept for reading: [Errno 2] No such file")


def test_tokens_are_shown_as_text(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = build_tokenizer()
    words = ["<|im_start|>", "\u0120hello", "\u010a", "\u00c3", "x"]
    ids = tokenizer.convert_tokens_to_ids(words)
    one = sample("e/0", sampled=5)
    row = to_row("g", 0, 0, 1.0, replace(one, token_ids=(*one.token_ids[:4], *ids)))
    write(tmp_path, 1, [TrainedRow(row, row.mask, row.logprobs, row.logprobs)], str(tiny))
    assert status("rows", str(tmp_path), "--json") == 0
    said = json.loads(capsys.readouterr().out)["texts"][4:]
    assert said == ["<|im_start|>", " hello", "\n", "\u00c3", "x"]
    assert status("rows", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines[4:9]] == [
        '"<|im_start|>"', '" hello"', '"\\n"', '"\u00c3"', '"x"'
    ]  # fmt: skip


def test_the_tokenizer_of_a_checkpoint_serves_where_the_models_folder_is_gone(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1, [trained()], "hub/name")
    assert status("rows", str(tmp_path), "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["texts"] is None and captured.err.startswith("ids alone: ")
    folder = tmp_path / "checkpoints" / "global_step_1"
    (folder / "actor" / "huggingface").mkdir(parents=True)
    torch.save({}, folder / "data.pt")
    build_tokenizer().save_pretrained(folder / "actor" / "huggingface")
    assert status("rows", str(tmp_path), "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["texts"]) == 12
