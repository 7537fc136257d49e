"""The archive: an archived episode is found by its name and its task, and retention bounds all that is kept."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.commands import Commands
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.io.storage.archive import ArchiveFile, Archiver
from ajet_proxy.io.storage.compaction import compact
from ajet_proxy.io.storage.data_dir import ARCHIVE
from ajet_proxy.offline import replay_lines
from ajet_sdk.errors import Conflict, NotFound, NotReady
from ajet_sdk.routes import Ack, OpenEpisode, Reward
from tests.kit.histories import encoded, everything, write_segments
from tests.kit.ledger_rig import LedgerRig
from tests.proxy.io.storage.test_compaction import eventful, run, seen, state_in


@pytest.mark.parametrize("task", ["two\nlines", "wide\u3000space", "nul\0", "é", "'; --"])
def test_an_archived_episode_is_found_by_its_task_whatever_its_signs(tmp_path: Path, task: str) -> None:
    rig = LedgerRig()
    rig.seal(rig.open(task=task))
    rig.archive()
    write_segments(tmp_path, encoded(rig.events), [len(rig.events)])
    compact(tmp_path)
    archive = ArchiveFile(tmp_path)
    assert [episode.opening.task for episode in archive.latest(None, task, None, 9)] == [task]
    assert list(archive.latest(None, "\ud800", None, 9)) == []
    archive.close()


def test_what_retention_removes_is_gone_whole_and_its_sums_stay(tmp_path: Path) -> None:
    rig = eventful()
    write_segments(tmp_path, encoded(rig.events), [len(rig.events) - 1])
    assert run(tmp_path, "1e9", "0").stdout == "0\n", "the daemon has yet to see that they are there"
    assert seen(state_in(tmp_path), rig) == seen(rig.state, rig)
    leaving, batches = rig.state.episodes.leaving, rig.state.batches.leaving
    trained = next(episode for episode in leaving.values() if episode.state == "trained")
    done = run(tmp_path, "1e9", "0")
    assert (done.returncode, done.stdout) == (0, f"{len(leaving)}\n")
    state, removed = state_in(tmp_path), list[int]()
    assert everything(state) == everything(rig.state), "the counters among it"
    assert [state.episodes.find(name) for name in leaving] == [None] * len(leaving)
    for name in batches:
        with pytest.raises(NotFound, match=f"no batch {name}"):
            state.batches.known(name)
    commands = Commands(state, Presence())
    list(replay_lines(tmp_path, removed.append))
    assert removed == [len(batches)]
    with pytest.raises(NotFound, match=f"no episode {trained.id}"):
        commands.reward(trained.id, Reward(value=1.0, id="given"), reward_id="given", at=0.0)
    with pytest.raises(NotFound, match="no batch"):
        commands.leases.ack(next(iter(batches)), Ack(policy_version=1), at=0.0)
    assert commands.open_episode(OpenEpisode(), episode=trained.id, at=0.0, tenant="another")
    assert run(tmp_path, "1e9", "0").stdout == "0\n"


def test_a_batch_stays_while_one_of_its_episodes_does(tmp_path: Path) -> None:
    rig = LedgerRig()
    first = rig.ready()
    returned = rig.lease(group_size=1)
    assert returned is not None
    rig.nack(returned)
    rig.at += 10
    second = rig.ready()
    back = rig.lease(group_size=2)
    assert back is not None
    rig.nack(back)
    both = rig.lease(group_size=2)
    assert both is not None
    rig.ack(both, **{first: "too long"})
    rig.archive()
    rig.state.episodes.leaving[first].ended_at = 1.0
    with closing(Archiver(tmp_path)) as archiver:
        archiver.put(rig.state.episodes.leaving.values(), rig.state.batches.leaving.values())
        assert archiver.retain(2.0, 1) == 0
    rig.state.arrived([first, second], [returned, back, both])
    rig.state.episodes.archive = archive = ArchiveFile(tmp_path)
    with closing(Archiver(tmp_path)) as archiver:
        assert archiver.retain(2.0, 0) == 1
    assert archive.batch(returned) is None
    with pytest.raises(Conflict, match="went elsewhere"):
        rig.ack(back)
    assert [e.episode for group in views.batch(rig.state, both).groups for e in group.episodes] == [second]
    with closing(Archiver(tmp_path)) as archiver:
        assert archiver.retain(0.0, 1) == 1
    assert archive.batch(both) is None
    archive.close()


def test_the_oldest_go_until_the_rest_fits(tmp_path: Path) -> None:
    rig = LedgerRig()
    names = []
    for _ in range(5):
        rig.at += 1
        names.append(rig.in_state("trained"))
    rig.archive()
    rig.open()
    write_segments(tmp_path, encoded(rig.events), [len(rig.events) - 1])
    assert compact(tmp_path) == 0
    assert compact(tmp_path, limit=1 << 20) == 0
    archive = ArchiveFile(tmp_path)
    full = (tmp_path / ARCHIVE).stat().st_size
    gone = compact(tmp_path, limit=full - 1)
    assert 0 < gone < 5
    assert [archive.episode(name) is None for name in names] == [True] * gone + [False] * (5 - gone)
    assert compact(tmp_path, ended_after=rig.state.now) == 4 - gone
    archive.close()


def test_no_metadata_or_notes_take_the_archive_over_its_limit(tmp_path: Path) -> None:
    rig, limit = LedgerRig(), 600_000
    with closing(ArchiveFile(tmp_path)) as archive:
        for round in range(12):
            for number in range(20):
                rig.at += 1
                episode = rig.open(metadata={"about": "x" * 5000})
                rig.reward(episode, note=f"{number}" * 3000)
                rig.archive()
            with closing(Archiver(tmp_path)) as archiver:
                archiver.put(rig.state.episodes.leaving.values(), [])
            rig.state.episodes.leaving.clear()
            with closing(Archiver(tmp_path)) as archiver:
                removed = archiver.retain(0.0, limit)
            pages = 4096 * sqlite3.connect(tmp_path / ARCHIVE).execute("PRAGMA page_count").fetchone()[0]
            assert pages <= limit and (removed > 0) == (round > 0)
        kept = len(list(archive.latest(None, None, None, 1000)))
    assert 20 < kept < 40


def test_no_more_goes_than_has_to(tmp_path: Path) -> None:
    rig = LedgerRig()
    for _ in range(400):
        rig.at += 1
        rig.abort(rig.open())
    with closing(Archiver(tmp_path)) as archiver:
        archiver.put(rig.state.episodes.values(), [])
    full = (tmp_path / ARCHIVE).stat().st_size
    with closing(Archiver(tmp_path)) as archiver:
        assert archiver.retain(0.0, full // 2) < 250


def test_an_archive_of_another_version_is_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / ARCHIVE)) as connection:
        connection.executescript("CREATE TABLE episodes (name TEXT PRIMARY KEY); PRAGMA user_version = 2;")
    assert run(tmp_path).stderr == f"cannot compact {tmp_path}: another version of ajet-proxy wrote it\n"
    with closing(ArchiveFile(tmp_path)) as archive, pytest.raises(NotReady, match="another version of ajet-proxy"):
        archive.episode("x")
