"""Formats: files that were left on disk are read, and say the same. `tests.formats.record` has recorded it."""

from __future__ import annotations

import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ajet_proxy.io.storage.compaction import compact
from ajet_proxy.io.storage.journal import read, segments
from ajet_proxy.offline import replay_lines
from tests.formats.record import HERE, told
from tests.kit.strategies import EVENT_KINDS
from tests.proxy.serving import serving


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory as it was recorded."""
    with tarfile.open(HERE / "data.tar.xz") as packed:
        packed.extractall(tmp_path / "data", filter="data")
    return tmp_path / "data"


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """All that the daemon said of it."""
    found: dict[str, Any] = json.loads(lzma.decompress((HERE / "said.json.xz").read_bytes()))
    found["status"].pop("archived")  # grows with each start
    return found


def holds(new: Any, old: Any) -> bool:
    """Tell whether all that is in `old` is in `new`, which may have more fields."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(name in new and holds(new[name], value) for name, value in old.items())
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(holds, new, old))
    return bool(new == old)


def test_more_is_no_difference_and_less_is() -> None:
    assert holds({"a": [{"b": 1, "c": 2}], "d": 0}, {"a": [{"b": 1}]})
    assert not any(holds(new, {"a": [1]}) for new in ({}, {"a": []}, {"a": [2]}, {"a": [1, 1]}, [1], {"a": None}))


def test_a_data_directory_has_every_kind_of_event(data_dir: Path) -> None:
    """Archive, snapshot and segments: none of the ways to read is left out."""
    records = (record for path in segments(data_dir) for record, _ in read(path))
    kinds = {msgpack.unpackb(record, strict_map_key=False)[0] for record in records}
    assert kinds == {kind.__name__ for kind in EVENT_KINDS}
    assert (data_dir / "archive.sqlite").is_file() and list((data_dir / "journal").glob("*.snapshot"))


@pytest.mark.parametrize("compacted", [False, True])
async def test_the_daemon_starts_on_it_and_says_the_same(data_dir: Path, said: dict[str, Any], compacted: bool) -> None:
    if compacted:
        async with serving(data_dir, upstream=("http://127.0.0.1:9",)) as client:
            await client.store.end_segment()
        compact(data_dir)
    async with serving(data_dir, upstream=("http://127.0.0.1:9",)) as client:
        new = await told(client)
    for name, record in said["records"].items():
        assert holds(new["records"][name], record), name
    assert new["records"].keys() == said["records"].keys()
    assert holds([new["status"], new["clients"], new["runs"]], [said["status"], said["clients"], said["runs"]])


def test_replay_gives_what_it_gave(data_dir: Path, said: dict[str, Any]) -> None:
    assert holds([json.loads(line) for line in replay_lines(data_dir)], said["replayed"])
