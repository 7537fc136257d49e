"""Changes of the configuration that a run takes up between two steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.routes import SetMix
from ajet_sdk.runs import LEARNING_RATE, LIVE
from ajet_sdk.settings import ConfigError
from ajet_trainer.config import SETTINGS, Config, check, digest, load
from ajet_trainer.live import OURS, Live, differing, taken_up
from ajet_trainer.mix import Mixture
from tests.trainer.test_step import Setting

START = check(Config(model="m", groups=4, verl={LEARNING_RATE: 1e-5, "a.b": 1}))


class File:
    def __init__(self, folder: Path) -> None:
        self.path, self.said = folder / "run.toml", list[str]()
        self.write()
        self.load = lambda: load(str(self.path))
        self.live = Live(self.path, lambda: self.load(), self.said.append)

    def write(
        self, trainer: str = "groups = 4", verl: str = f"{LEARNING_RATE} = 1e-5\na.b = 1", mix: str = ""
    ) -> None:
        self.path.write_text(f'[trainer]\nmodel = "m"\n{trainer}\n[verl]\n{verl}\n{mix}')


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


def test_the_live_keys_are_settings() -> None:
    assert set(OURS) <= set(SETTINGS.options)
    assert {f"trainer.{name}" for name in OURS} | {f"verl.{LEARNING_RATE}"} == set(LIVE)


def test_a_file_that_did_not_change_changes_nothing(file: File) -> None:
    assert file.live(START) is START
    file.write("groups = 4 ")
    assert file.live(START) is START
    assert file.said == []


def test_live_keys_are_taken_up_and_others_are_named(file: File) -> None:
    file.write("groups = 8\ntotal_steps = 9\nsave_freq = 1\nmax_staleness = 2\nmax_tokens = 64", "a.b = 2\nc = 1")
    found = file.live(START)
    assert found == replace(
        START, groups=8, total_steps=9, save_freq=1, max_staleness=2, verl={"a.b": 1},
    )  # fmt: skip
    assert file.said == ["max_tokens, a.b, c: a change of this takes a restart"]
    assert file.live(found) is found


def test_the_name_that_engines_serve_stays_where_the_file_names_none(file: File) -> None:
    served = replace(START, model_name="Qwen/Qwen3-8B")
    file.write("groups = 8")
    assert file.live(served) == replace(served, groups=8) and file.said == []
    file.write("model_name = 'other'")
    file.live(served)
    assert file.said == ["model_name: a change of this takes a restart"]


def test_a_change_that_could_not_be_read_is_read_at_the_next_look(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise ConfigError("cannot read run.toml: Too many open files")

    file.write("groups = 8")
    with monkeypatch.context() as patch:
        patch.setattr(file, "load", fails)
        assert file.live(START) is file.live(START) is START
    assert file.said == ["the configuration stays as it is: cannot read run.toml: Too many open files"]
    assert file.live(START) == replace(START, groups=8)


def test_the_shares_of_lanes_are_taken_up(file: File) -> None:
    file.write(mix="[mix]\nmath = 0.5\ncode = 0.5\n")
    found = file.live(START)
    assert found == replace(START, mix=(Mixture(0, {"math": 0.5, "code": 0.5}),))
    assert digest(found) != digest(START)
    assert file.said == []


def test_a_run_tells_the_daemon_of_what_has_changed_and_of_nothing_else(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 6, groups=2, group_size=2, mix=(Mixture(0, {"math": 1.0}),))
    run = setting.begun()
    run.step()
    run.live = lambda config: replace(config, mix=(Mixture(0, {"code": 1.0}),))
    run.step()
    run.live = lambda config: replace(config, mix=())
    run.step()
    run.live = lambda config: replace(config, groups=1)
    run.step()
    assert setting.proxy.mixes == [
        SetMix({"math": 1.0}, 2, 2), SetMix({"code": 1.0}), SetMix(None, 1, 2),
    ]  # fmt: skip
    assert any("lanes keep their shares" in line for line in setting.said)


def test_a_file_that_cannot_be_used_changes_nothing_and_says_why(file: File) -> None:
    for wrong in ("groups = -1", "groups =", "gruops = 1"):
        file.write(wrong)
        assert file.live(START) is START
    file.path.unlink()
    assert file.live(START) is START
    assert len(file.said) == 4
    assert all(line.startswith("the configuration stays as it is: ") for line in file.said)
    file.write("groups = 2")
    assert file.live(START).groups == 2


def test_digests_tell_what_trains_and_nothing_of_the_host() -> None:
    assert digest(START) == digest(replace(START, key="k", run_dir="x", proxy_url="http://a:1", tls_cert="c"))
    there = replace(
        START, model="/srv/m", model_name="served", weights_dir="w", engine_urls=("http://a:1",), candidate_urls=("x",)
    )
    assert digest(START) == digest(there)
    assert len({digest(START), digest(replace(START, groups=5)), digest(replace(START, verl={}))}) == 3
    assert taken_up(START, replace(START, key=("other",))) == START
    assert differing(START, replace(START, key=("other",))) == []


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, None), (None, 1)])
def test_what_follows_from_a_change_that_takes_a_restart_waits_with_it(
    file: File, before: int | None, after: int | None
) -> None:
    engines = "engine_urls = ['http://a:1']"
    start = check(replace(START, engine_urls=("http://a:1",), overlap=before))
    file.write("\n".join([engines, "groups = 8", *([] if after is None else [f"overlap = {after}"])]))
    assert file.live(start) == replace(start, groups=8)
    assert file.said == ["max_staleness, overlap: a change of this takes a restart"]


def test_a_change_that_another_one_needs_is_named_with_what_it_waits_for(file: File) -> None:
    start = check(replace(START, ahead=4))
    file.write("groups = 8\nahead = 8")
    assert file.live(start) is start
    (said,) = file.said
    assert "ahead: a change of this takes a restart, and without it ahead = 4 cannot be" in said


def test_a_run_takes_a_change_up_at_its_next_step(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 6, groups=1)
    run = setting.start()
    faster = replace(setting.config, total_steps=2, verl={LEARNING_RATE: 1.0})
    changes: dict[int, Config] = {1: faster}
    run.live = lambda config: changes.pop(setting.learner.version, config)
    run.start()
    run.loop()
    run.close()
    assert [line["config"] for line in setting.lines()] == [digest(setting.config), digest(faster)]
    assert setting.learner.tuned == faster
    shown = json.loads((tmp_path / "phase.json").read_text())
    assert (shown["of"], shown["config"]) == (2, digest(faster))


def test_a_run_that_waits_ends_when_it_has_no_more_steps_to_make(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 6)
    run = setting.begun()
    run.step()
    run.live = lambda config: replace(config, total_steps=1)
    run.step()
    assert (run.done, setting.learner.version) == (True, 1)


def test_a_learning_rate_that_the_learner_cannot_change_stays_and_all_else_changes(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 3, verl={LEARNING_RATE: 1e-5})
    run, said = setting.begun(), "the learning rate takes a restart with this strategy"

    def tune(config: Config) -> None:
        if config.verl[LEARNING_RATE] != 1e-5:
            raise ConfigError(said)
        setting.learner.tuned = config

    setting.learner.tune = tune  # type: ignore[method-assign]
    before, wanted = run.config, replace(run.config, verl={LEARNING_RATE: 1.0})
    run.live = lambda config: replace(wanted, verl=dict(wanted.verl))
    run.step()
    assert (run.config, setting.learner.version, setting.said[-2]) == (before, 1, said)
    wanted = replace(wanted, groups=1, save_freq=3)
    run.step()
    assert run.config == setting.learner.tuned == replace(before, groups=1, save_freq=3)
    shown = json.loads((tmp_path / "phase.json").read_text())
    assert (shown["config"], shown["refused"]) == (digest(run.config), said) and digest(wanted) != digest(run.config)
    wanted = run.config
    run.step()
    assert json.loads((tmp_path / "phase.json").read_text())["refused"] == ""
