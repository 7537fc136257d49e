"""Trainers at a real daemon: one of a model at a time, and nothing of one run reaches the next."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import Conflict
from ajet_trainer.config import Config
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link
from ajet_trainer.presence import Presence, trainer_of
from ajet_trainer.progress import Progress
from ajet_trainer.run_folder import put, word_in
from ajet_trainer.sampling import Rule
from ajet_trainer.step import Run
from tests.kit.proxy_process import ProxyProcess
from tests.kit.rig import Rig
from tests.kit.stub_process import stub_process
from tests.trainer.scripted_learner import Disk, Instants, ScriptedLearner


class Attached(ScriptedLearner):
    colocated, rule = False, Rule(compares=False)
    pushed = 0

    def push(self) -> None:
        self.pushed += 1


@contextmanager
def trainer(url: str, folder: Path, said: list[str]) -> Iterator[Run]:
    """A run of `folder` as `ajet_trainer.training` puts it together."""
    config = Config(
        model="none", model_name="stub", proxy_url=url, run_dir=str(folder), groups=1, group_size=1, min_group_size=1,
        total_steps=1,
    )
    folder.mkdir(exist_ok=True)
    with closing(Link.of(config, trainer=trainer_of(config), deadline_s=300.0)) as link:
        link.meet()
        with Presence(link, 0.2), Keeper(link) as keeper:
            run = Run(config, link, Attached(Disk(), Instants()), keeper,
                      Progress(folder, 1, said.append))  # fmt: skip
            try:
                yield run
            finally:
                run.close()


def test_the_word_of_a_run_is_kept_in_its_folder(tmp_path: Path) -> None:
    words = []
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        words.append(word_in(tmp_path / name / "run"))
    assert words[0] == words[1] != words[2]
    one, other = (trainer_of(Config(model="m", run_dir=str(tmp_path / "a"))) for _ in range(2))
    assert (one.run, one.folder) == (words[0], str(tmp_path / "a")) == (other.run, other.folder)
    assert one.instance != other.instance


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ProxyProcess]:
    with stub_process() as engine, ProxyProcess(engine, tmp_path / "data") as proxy:
        yield proxy


def played(rig: Rig) -> str:
    """A ready episode."""
    name = rig.open(task="t")
    rig.chat(name).raise_for_status()
    rig.reward(name).raise_for_status()
    return name


def test_a_second_trainer_of_a_model_is_refused_and_the_first_goes_on(daemon: ProxyProcess, tmp_path: Path) -> None:
    said = list[str]()
    with trainer(daemon.url, tmp_path / "one", said) as first, Rig(daemon.url) as rig:
        first.start()
        at_work = f"in {tmp_path}/one .run {word_in(tmp_path / 'one' / 'run')}. is at work"
        with pytest.raises(Conflict, match=at_work), trainer(daemon.url, tmp_path / "two", said):
            """It does not come this far."""
        played(rig)
        first.step()
        assert rig.status()["models"]["stub"]["policy_version"] == 1
    with trainer(daemon.url, tmp_path / "two", said) as second:  # the first has left
        second.start()


def test_two_runs_in_a_row_share_nothing(daemon: ProxyProcess, tmp_path: Path) -> None:
    said = list[str]()
    with Rig(daemon.url) as rig:
        with trainer(daemon.url, tmp_path / "one", said) as first:
            first.start()
        ready = [played(rig) for _ in range(3)]  # nobody paces agents now, and the engine has its weights
        still_open = rig.open(task="t")
        rig.chat(still_open).raise_for_status()
        with trainer(daemon.url, tmp_path / "two", said) as second:
            second.start()
            assert said == ["another run had this model: 3 of its episodes are discarded, and 0 of its leases are void"]
            rig.reward(still_open).raise_for_status()
            found = {rig.record(name)["reason"] for name in (*ready, still_open)}
            assert found == {"other_run"}
            fresh = played(rig)
            second.step()
            assert rig.record(fresh)["state"] == "trained"
            line = (tmp_path / "two" / "metrics.jsonl").read_text()
            assert '"other_run_episodes": 3' in line


def test_who_was_taken_over_pushes_nothing_and_ends(daemon: ProxyProcess, tmp_path: Path) -> None:
    """The same folder again, as where its file system has no locks: the later process has it."""
    said = list[str]()
    with trainer(daemon.url, tmp_path / "one", said) as first, Rig(daemon.url) as rig:
        first.start()
        assert isinstance(first.learner, Attached)
        pushed = first.learner.pushed
        played(rig)
        with trainer(daemon.url, tmp_path / "one", said) as again:
            again.start()
            for ask in (first.step, first.gate.push, first.start):
                with pytest.raises(Conflict, match="has taken the place of this trainer"):
                    ask()
            assert first.learner.pushed == pushed
            assert rig.status()["gate"]["state"] == "open"
            again.step()


def test_a_sign_of_life_that_fails_is_one_that_is_missed() -> None:
    heard = threading.Event()

    class Failing:
        beats = 0

        def within(self, deadline_s: float, answer_s: float) -> Failing:
            return self

        def says(self, word: str) -> None:
            self.beats += word == "beats"
            if self.beats == 1:
                raise ValueError("no JSON")
            heard.set()

    link: Any = Failing()
    with Presence(link, 0.01):
        assert heard.wait(300)


def test_a_file_is_on_disk_before_it_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves an empty one."""
    path, synced, sync = tmp_path / "run", list[int](), os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        assert path.read_text() == "before"
        sync(descriptor)

    path.write_text("before")
    monkeypatch.setattr(os, "fsync", noted)
    put(path, "after")
    assert (synced, path.read_text()) == ([5], "after")


def test_a_folder_whose_word_is_lost_gets_another(tmp_path: Path) -> None:
    path = tmp_path / ".supervisor"
    path.touch()
    assert len(word := word_in(path)) == 16 and word_in(path) == word
