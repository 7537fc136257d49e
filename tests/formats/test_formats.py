"""What earlier versions left on disk and sent is read by this one, and says the same.

The folders beside this file were written by `tests.formats.record` with the code of the version that they are named
for. They are never written again: whoever changes a format adds one.
"""

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
from ajet_sdk.frame import FrameError, decode_batch
from tests.formats.record import HERE, told
from tests.kit.strategies import EVENT_KINDS
from tests.proxy.serving import serving

VERSIONS = sorted(path.parent.name for path in HERE.glob("*/frame.msgpack"))


def test_there_is_a_version() -> None:
    assert "0.1.0" in VERSIONS


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> Path:
    return HERE / str(request.param)


@pytest.fixture
def data_dir(version: Path, tmp_path: Path) -> Path:
    """A data directory as that version left it."""
    with tarfile.open(version / "data.tar.xz") as packed:
        packed.extractall(tmp_path / "data", filter="data")
    return tmp_path / "data"


def said(version: Path) -> dict[str, Any]:
    """What that version said of it."""
    found: dict[str, Any] = json.loads(lzma.decompress((version / "said.json.xz").read_bytes()))
    return found


def holds(new: Any, old: Any) -> bool:
    """Whether all that is in `old` is in `new`, which may have more fields."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(name in new and holds(new[name], value) for name, value in old.items())
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old) and all(map(holds, new, old))
    return bool(new == old)


def test_more_is_no_difference_and_less_is() -> None:
    assert holds({"a": [{"b": 1, "c": 2}], "d": 0}, {"a": [{"b": 1}]})
    assert not any(holds(new, {"a": [1]}) for new in ({}, {"a": []}, {"a": [2]}, {"a": [1, 1]}, [1], {"a": None}))


def test_a_data_directory_has_every_kind_of_event(version: Path, data_dir: Path) -> None:
    """Archive, snapshot and segments: none of the ways to read is left out."""
    if version.name == "0.1.0":
        records = (record for path in segments(data_dir) for record, _ in read(path))
        kinds = {msgpack.unpackb(record, strict_map_key=False)[0] for record in records}
        assert len(kinds) == 19 and kinds <= {kind.__name__ for kind in EVENT_KINDS}
    if version.name == "0.1.0-clients":
        records = (record for path in segments(data_dir) for record, _ in read(path))
        kinds = {msgpack.unpackb(record, strict_map_key=False)[0] for record in records}
        assert kinds >= {"ClientJoined", "ClientGone"} and len(said(version)["clients"]) == 4
    assert (data_dir / "archive.sqlite").is_file() and list((data_dir / "journal").glob("*.snapshot"))


@pytest.mark.parametrize("compacted", [False, True])
async def test_the_daemon_starts_on_it_and_says_the_same(version: Path, data_dir: Path, compacted: bool) -> None:
    if compacted:
        async with serving(data_dir, upstream=("http://127.0.0.1:9",)):
            """Another segment, so that those before it can be compacted."""
        compact(data_dir)
    async with serving(data_dir, upstream=("http://127.0.0.1:9",)) as client:
        new, old = await told(client), said(version)
    for name, record in old["records"].items():
        assert holds(new["records"][name], record), name
    assert new["records"].keys() == old["records"].keys()
    old["status"].pop("archived")  # grows with each start
    assert holds(new["status"], old["status"])


def test_replay_gives_what_it_gave(version: Path, data_dir: Path) -> None:
    assert holds([json.loads(line) for line in replay_lines(data_dir)], said(version)["replayed"])


def test_a_frame_says_what_its_daemon_said(version: Path) -> None:
    frame = (version / "frame.msgpack").read_bytes()
    if version.name == "0.1.0":
        with pytest.raises(FrameError, match="frame has wire version 1; this reader knows 3 and 2"):
            decode_batch(frame)
        return
    batch = decode_batch(frame)
    old = said(version)
    samples = [sample for group in batch.groups for episode in group.episodes for sample in episode.samples]
    replayed = {sample["sample"]: sample for sample in old["replayed"]}
    assert len(samples) == 2
    for sample in samples:
        assert holds(sample.to_json(), replayed[sample.sample])
    names = {episode.episode for group in batch.groups for episode in group.episodes}
    assert {old["records"][name]["state"] for name in names} == {"leased"}
