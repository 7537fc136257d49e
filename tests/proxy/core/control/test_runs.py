"""The routes of runs: what is checked before it is stored, what is shown, and what never is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ajet_proxy.core.control import runs
from ajet_proxy.core.control.runs import change_run, granted, put_run
from ajet_proxy.core.identity.keys import EVERYTHING, Claims, Keys
from ajet_proxy.core.ledger.supervisors import Verdict
from ajet_sdk.errors import BadRequest, Conflict, NotFound, NotReady
from ajet_sdk.routes import Supervise
from ajet_sdk.runs import line_digest
from tests.kit.control_rig import Caller
from tests.kit.refused import refused

LR = "actor_rollout_ref.actor.optim.lr"
CONFIG = {"trainer": {"model": "m", "groups": 4}, "verl": {LR: 1e-5}}
OPERATOR = Claims("operator")
KEY = Keys(b"s").issue(Claims("admin"))


class Site(Caller):
    """Asks as an operator, while a supervisor speaks."""

    def ask(self, method: str, path: str, body: Any = None, *, claims: Claims = OPERATOR, **query: Any) -> Any:
        return super().ask(method, path, body, claims=claims, query=query)

    def report(self, name: str = "s", **runs: Any) -> None:
        self.supervisors.hear(Supervise(name, name, runs), self.rig.state.runs, self.rig.at)

    def listed(self) -> Any:
        shown = self.ask("GET", "/runs")
        return shown | {"runs": list(shown["runs"])}

    def put(self, config: Any = CONFIG, desired: str = "running", **more: Any) -> Any:
        return self.ask("PUT", "/runs/r", {"config": config, "desired": desired, **more})


@pytest.fixture
def site() -> Site:
    made = Site()
    made.report()
    return made


def test_a_run_is_put_shown_changed_and_forgotten(site: Site) -> None:
    shown = site.put()
    assert (shown["run"], shown["supervisor"], shown["desired"], shown["config"]) == ("r", "s", "running", CONFIG)
    assert (shown["digest"], shown["starts"], shown["actual"]) == ("d", 1, {"state": "unknown"})
    site.report(r={"state": "running", "starts": 1, "config": "d"})
    assert site.ask("GET", "/runs/r")["reason"] is None
    changed = site.ask("PATCH", "/runs/r", {"config": {"verl": {"actor_rollout_ref": {"actor": {"optim": {"lr": 2}}}}}})
    assert changed["config"]["verl"] == {LR: 2}
    removed = site.ask("PATCH", "/runs/r", {"config": {"trainer": {"groups": None}}, "desired": "stopped"})
    assert (removed["config"]["trainer"], removed["desired"]) == ({"model": "m"}, "stopped")
    with pytest.raises(Conflict):
        site.ask("DELETE", "/runs/r")
    site.report(r={"state": "stopped"})
    assert site.listed() == {
        "runs": [site.ask("GET", "/runs/r")], "supervisors": {"s": {"heard_s": 0.0, "silent": False}},
    }
    assert site.ask("DELETE", "/runs/r") == {"run": "r"}
    for method, path in (("GET", "/runs/r"), ("DELETE", "/runs/r"), ("PATCH", "/runs/r"), ("GET", "/runs/r/log")):
        with refused(NotFound, "unknown_run"):
            site.ask(method, path, {} if method == "PATCH" else None)


def test_only_an_admin_forgets_a_run_whose_supervisor_is_silent(site: Site) -> None:
    site.put(desired="stopped")
    site.rig.at += 100
    with pytest.raises(Conflict):
        site.ask("DELETE", "/runs/r")
    assert site.ask("GET", "/runs")["supervisors"]["s"]["silent"]
    site.report()
    with pytest.raises(Conflict):
        site.ask("DELETE", "/runs/r", claims=EVERYTHING)
    site.rig.at += 100
    assert site.ask("DELETE", "/runs/r", claims=EVERYTHING) == {"run": "r"}


def test_nothing_is_stored_that_nobody_checked() -> None:
    site = Site()
    for more in ({}, {"supervisor": "s"}):
        with refused(NotReady, "no_supervisor"):
            site.put(**more)
    site.report()
    site.put()
    site.rig.at += 100
    with pytest.raises(NotReady, match="last heard 100 s ago"):
        site.ask("PATCH", "/runs/r", {"config": {"trainer": {"groups": 5}}})
    assert site.ask("PATCH", "/runs/r", {"desired": "stopped"})["desired"] == "stopped"
    assert site.ask("PATCH", "/runs/r", {"config": {"trainer": {"groups": 4}}})["config"] == CONFIG


def test_what_a_supervisor_refuses_is_not_stored(site: Site) -> None:
    asked = site.asked("PUT", "/runs/r", {"config": CONFIG, "desired": "running"})
    with pytest.raises(BadRequest) as caught:
        granted(asked, put_run(asked), Verdict(error=f"no such model {KEY}", param="trainer.model"))
    assert (caught.value.code, caught.value.param) == ("config_refused", "trainer.model")
    assert KEY not in caught.value.message
    assert not site.rig.state.runs


def test_a_wish_that_somebody_overtook_is_refused(site: Site) -> None:
    site.put()
    asked = site.asked("PATCH", "/runs/r", {"config": {"trainer": {"groups": 5}}})
    wish = change_run(asked)
    site.ask("PATCH", "/runs/r", {"desired": "stopped"})
    with refused(Conflict, "run_changed"):
        granted(asked, wish, Verdict(digest="d"))


def test_which_supervisor(site: Site) -> None:
    site.report("t")
    with pytest.raises(BadRequest, match="say which supervisor: s, t"):
        site.put()
    assert site.put(supervisor="t")["supervisor"] == "t"
    assert site.put(supervisor="t")["supervisor"] == "t"
    assert site.put()["supervisor"] == "t"
    with refused(Conflict, "other_supervisor"):
        site.put(supervisor="s")


@pytest.mark.parametrize("name", ["..", ".x", "a/b", "-x", "a" * 65, "a b", "ä"])
def test_a_run_is_called_like_a_folder(site: Site, name: str) -> None:
    asked = replace(site.asked("PUT", "/runs/r", {"config": CONFIG, "desired": "running"}), id=name)
    with pytest.raises(BadRequest, match="run must have 1 to 64"):
        put_run(asked)


def test_a_restart_is_asked_for_by_its_word(site: Site) -> None:
    site.put()
    with pytest.raises(Conflict) as caught:
        site.ask("PATCH", "/runs/r", {"config": {"trainer": {"model": "n", "groups": 2}}})
    assert (caught.value.code, caught.value.param) == ("needs_restart", "trainer.model")
    assert site.ask("PATCH", "/runs/r", {"config": {"trainer": {"model": "n"}}, "restart": True})["starts"] == 2


def test_lines_are_read_from_a_place_on(site: Site) -> None:
    site.put()
    assert site.ask("GET", "/runs/r/metrics") == {"lines": [], "next": -1, "first": -1}
    report = {"state": "running", "log": {"after": 0, "start": 0, "end": 8, "lines": ["one", "two"]},
              "last": -1, "follows": line_digest(""),
              "metrics": [{"step": 1, "reward_mean": 0.5}, {"step": 2}]}  # fmt: skip
    site.report(r=report)
    assert site.ask("GET", "/runs/r/log") == {"lines": ["one", "two"], "next": 8, "first": 0}
    assert site.ask("GET", "/runs/r/log", after="4") == {"lines": ["two"], "next": 8, "first": 0}
    assert site.ask("GET", "/runs/r/metrics", after="1") == {"lines": [{"step": 2}], "next": 2, "first": -1}
    site.report(r={"state": "running", "last": 1, "follows": line_digest('{"step": 2}')})
    assert site.ask("GET", "/runs/r/metrics", after="2") == {"lines": [], "next": 1, "first": -1}
    for place in ("", "x", "1.5", "²", "9" * 20, "--1"):
        with pytest.raises(BadRequest, match="after must be an integer"):
            site.ask("GET", "/runs/r/log", after=place)


def test_no_answer_shows_a_key(site: Site) -> None:
    site.put()
    line = f"the key is {KEY}"
    site.report(r={"state": "failed", "reason": line, "log": {
        "after": 0, "start": 0, "end": len(line) + 1, "lines": [line],
    }})
    shown = [site.listed(), site.ask("GET", "/runs/r"), site.ask("GET", "/runs/r/log")]
    assert "ajet-***" in str(shown)
    assert KEY not in str(shown)


def test_the_configurations_of_a_list_are_read_as_it_is_written(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be many, and who waits for something else must not wait for them. How the runs are is told at once."""
    read = list[str]()
    monkeypatch.setattr(runs, "tables", lambda config: read.append("one") or {})
    site.put()
    read.clear()
    shown = site.ask("GET", "/runs")["runs"]
    site.report(r={"state": "running"})
    assert read == []
    assert next(shown)["actual"]["state"] == "unknown" and read == ["one"]


def test_a_supervisor_speaks_and_is_told(site: Site) -> None:
    site.put()
    told = site.ask("POST", "/supervisor", {"name": "s", "instance": "s", "runs": {"r": {"state": "starting"}}})
    assert told["runs"]["r"]["desired"] == "running"
    assert site.ask("GET", "/runs/r")["actual"]["state"] == "starting"
