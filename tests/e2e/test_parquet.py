"""`export --format parquet`: the rows of the JSON lines, read back by Parquet's own library, which comes with verl."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from ajet_proxy import export
from ajet_proxy.core.trajectory.export import preference_row, sft_row
from ajet_proxy.export import FORMS, Choice, rows, write_jsonl, write_parquet
from ajet_sdk.errors import BadRequest
from ajet_sdk.sample import Sample
from tests.kit.histories import encoded, write_segments
from tests.kit.ledger_rig import LedgerRig

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("form", FORMS)
def test_parquet_holds_the_same_rows(tmp_path: Path, form: str) -> None:
    rig = LedgerRig()
    for answer, reward in ((6, 0.0), (7, 1.0)):
        episode = rig.open(task="t")
        call = rig.call(episode, (1, 2), (3, 4))
        rig.feedback(episode, call, value=1.0, text="fine", better="7")
        rig.call(episode, (1, 2, 3, 4, 5), (answer,))
        rig.call(episode, (9,), (answer,))
        rig.reward(episode, reward)
    write_segments(tmp_path, encoded(rig.events), [])

    def found() -> Any:
        return rows(tmp_path, form, Choice(), lambda episode: None)

    read = written(found(), form)
    assert read == [{name: value for name, value in row.items() if value is not None} for row in found()]
    assert len(read) == {"samples": 4, "sft": 4, "preferences": 2}[form]


@pytest.mark.parametrize("form", FORMS)
def test_every_column_that_a_row_can_have_is_there(form: str) -> None:
    """A row of a sample that leaves nothing out."""
    full = Sample(
        sample="e/1", episode="e", task="t", model="m", agent="a", token_ids=(1, 2), loss_mask=(0, 1),
        logprobs=(0.0, -0.1), policy_versions=((1, 1),), calls=("c",), spans=(("c", 1, 2),), reward=1.0,
        broken_by="parallel", repaired_tokens=3, uncertain_tokens=1,
        sampling=(({"logprobs": "raw", "top_p": 0.5}, 1), (None, 1)), finish_reasons=("stop",), turns=(1,),
    )  # fmt: skip
    told = [field.name for field in dataclasses.fields(full) if getattr(full, field.name) != field.default]
    assert {field.name for field in dataclasses.fields(full)} == set(told)
    row = {"samples": full.to_json(), "sft": sft_row(full), "preferences": preference_row(full, full)}[form]
    assert written(iter([row]), form) == [row]


@pytest.mark.parametrize("form", FORMS)
def test_text_that_is_no_utf8_is_written_as_in_json(form: str) -> None:
    half = "half \ud800"
    sample = Sample(
        sample="e/1", episode="e", task=half, model="m", agent=half, token_ids=(1, 2), loss_mask=(0, 1),
        logprobs=(0.0, -0.1), policy_versions=((1, 1),), calls=("c",), spans=(("c", 1, 2),), reward=1.0,
        finish_reasons=(half,), turns=(0,),
    )  # fmt: skip
    row = {"samples": sample.to_json(), "sft": sft_row(sample), "preferences": preference_row(sample, sample)}[form]
    write_jsonl([row], line := io.BytesIO())
    assert written(iter([row]), form) == [json.loads(line.getvalue())]


def test_what_is_in_memory_together_is_counted_by_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(
        sample="e/1", episode="e", task="t", model="m", agent="a", token_ids=(1,) * 30, loss_mask=(1,) * 30,
        logprobs=(0.0,) * 30, policy_versions=((1, 30),), calls=("c",), spans=(("c", 0, 30),), reward=1.0,
        finish_reasons=("stop",), turns=(0,),
    )  # fmt: skip
    monkeypatch.setattr(export, "VALUES_AT_ONCE", 150)
    for number, parts in ((0, 0), (1, 1), (2, 1), (5, 3)):
        write_parquet([sample.to_json()] * number, file := io.BytesIO(), "samples")
        read = parquet.ParquetFile(file)
        assert (read.metadata.num_rows, read.num_row_groups) == (number, parts)


def test_where_nothing_can_be_read_nothing_is_written(tmp_path: Path) -> None:
    file = io.BytesIO()
    with pytest.raises(BadRequest, match="holds no journal"):
        write_parquet(rows(tmp_path, "samples", Choice(), lambda episode: None), file, "samples")
    assert file.getvalue() == b""


def written(found: Any, form: str) -> list[Mapping[str, Any]]:
    """The rows as Parquet's library reads them from our file, without what is null, in the shape of JSON lines."""
    file = io.BytesIO()
    write_parquet(found, file, form)
    read = [
        {name: value for name, value in row.items() if value is not None}
        for row in parquet.read_table(io.BytesIO(file.getvalue())).to_pylist()
    ]
    for row in read:
        for name in ("spans", "policy_versions"):
            if name in row:
                row[name] = [list(item.values()) for item in row[name]]
        if "sampling" in row:
            told = [(item["sampling"], item["count"]) for item in row["sampling"]]
            row["sampling"] = [[None if text is None else json.loads(text), count] for text, count in told]
    return read
