"""`export --format parquet`: the rows of the JSON lines, read back by Parquet's own library, which comes with verl."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from ajet_proxy.export import FORMS, Choice, rows, write_parquet
from tests.kit.histories import encoded, write_segments
from tests.kit.ledger_rig import LedgerRig

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("form", FORMS)
def test_parquet_holds_the_same_rows(tmp_path: Path, form: str) -> None:
    rig = LedgerRig()
    for answer, reward in ((6, 0.0), (7, 1.0)):
        episode = rig.open(task="t")
        rig.call(episode, (1, 2), (3, 4))
        rig.call(episode, (1, 2, 3, 4, 5), (answer,))
        rig.call(episode, (9,), (answer,))
        rig.reward(episode, reward)
    write_segments(tmp_path, encoded(rig.events), [])

    def found() -> Any:
        return rows(tmp_path, form, Choice(), lambda episode: None)

    file = io.BytesIO()
    write_parquet(found(), file, form)
    read = [
        {name: value for name, value in row.items() if value is not None}
        for row in parquet.read_table(io.BytesIO(file.getvalue())).to_pylist()
    ]
    expected = [{name: value for name, value in row.items() if value is not None} for row in found()]
    for row in read:
        for name in ("spans", "policy_versions"):
            if name in row:
                row[name] = [list(item.values()) for item in row[name]]
    assert read == expected
    assert len(read) == {"samples": 4, "sft": 4, "preferences": 2}[form]
