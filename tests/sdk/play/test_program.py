"""Programs that never heard of us, in whatever language: their environment, their reward, their end."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import ajet_sdk
from ajet_sdk import errors
from ajet_sdk.play import membership, program
from ajet_sdk.play.child import Child
from ajet_sdk.play.program import Program, ProgramAgent, proxy_variable, reaching, run_program
from ajet_sdk.play.results import RunResult
from ajet_sdk.play.revision import of_program
from ajet_sdk.play.tasks import Line
from ajet_sdk.rewards import sources
from tests.kit.control_stub import DROP, ControlStub
from tests.kit.patience import LONG_S

PYTHON = sys.executable
NO_LINE = sources.PRINTED
LASTS = ("sh", "-c", "echo it has begun; exec sleep 3600")
REWARD_ITSELF = "import ajet_sdk; ajet_sdk.reward(0.25); print(7)"


def once(*argv: str, **more: Any) -> RunResult:
    """One episode of one program."""
    results = run_program(Program(argv, **more), ["t"])
    assert len(results) == 1
    item: RunResult = results[0]
    return item


def told(result: RunResult) -> tuple[str, float | None, str | None]:
    return result.outcome, result.reward, result.reason


@pytest.mark.parametrize(
    ("script", "more", "expected"),
    [
        ("exit 0", {}, ("rewarded", 1.0, None)),
        ("exit 3", {}, ("rewarded", 0.0, None)),
        ("exit 3", {"reward_from": "exit-code"}, ("rewarded", 0.0, None)),
        ("kill -SEGV $$", {}, ("rewarded", 0.0, None)),
        ("echo 1; echo 0.5; echo done", {"reward_from": "stdout"}, ("rewarded", 0.5, None)),
        ("echo -2e-1; echo loss: 3", {"reward_from": "stdout"}, ("rewarded", -0.2, None)),
        ("echo 1; exit 4", {"reward_from": "stdout"}, ("rewarded", 1.0, None)),
        ("echo nan; exit 4", {"reward_from": "stdout"},
         ("aborted", None, f"{NO_LINE} (exit code 4); its last line is 'nan'")),
        ("echo 1 >&2", {"reward_from": "stdout"}, ("aborted", None, f"{NO_LINE} (exit code 0)")),
        ("kill -KILL $$", {"reward_from": "stdout"}, ("aborted", None, f"{NO_LINE} (killed by SIGKILL)")),
        ('echo 0.75 > "$AJET_REWARD_FILE"', {"reward_from": "file"}, ("rewarded", 0.75, None)),
        ('printf 0.75 > "$AJET_REWARD_FILE"; exit 1', {"reward_from": "file"}, ("rewarded", 0.75, None)),
        ("true", {"reward_from": "file"}, ("aborted", None, f"{sources.WRITTEN} (exit code 0)")),
        ('mkfifo "$AJET_REWARD_FILE"', {"reward_from": "file"},
         ("aborted", None, f"{sources.WRITTEN} (exit code 0)")),
    ],
)
def test_where_the_reward_comes_from(stub: ControlStub, script: str, more: dict[str, str], expected: Any) -> None:
    assert told(once("sh", "-c", script, **more)) == expected
    record = stub.episodes["ep-0"]
    assert record["state"] == ("ready" if expected[0] == "rewarded" else "discarded")
    assert record["reward"] == expected[1]


def test_a_folder_that_cannot_be_removed_costs_no_reward(
    stub: ControlStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where something that the program has started elsewhere still writes into it."""
    def never(path: str, **more: Any) -> None:
        raise OSError(39, "Directory not empty", path)

    monkeypatch.setattr(os, "rmdir", never)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert told(once("sh", "-c", "echo 0.75 > $AJET_REWARD_FILE", reward_from="file")) == ("rewarded", 0.75, None)


FAILED = "the reward command failed ({}) without a line that is a number"


@pytest.mark.parametrize(
    ("grader", "value"),
    [("echo score: 0.5; echo all files", 0.5), ("printf 'x\\n' | grep -c y", 0.0), ("echo 1; kill -TERM $$", 1.0)],
)
def test_what_a_grader_prints(stub: ControlStub, grader: str, value: float) -> None:
    for script in ("exit 0", "exit 3", "kill -TERM $$"):
        assert told(once("sh", "-c", script, reward_cmd=grader)) == ("rewarded", value, None)


@pytest.mark.parametrize("line", ["9 passed, 2 warnings in 0.05s", "nan", ""])
def test_a_grader_that_succeeds_without_a_number_is_an_error_that_names_the_line(stub: ControlStub, line: str) -> None:
    item = once("true", reward_cmd=f"echo '{line}'")
    named = f"; its last line is {line!r}" if line else ""
    remedy = "the reward command must print a number alone, or as in 'score: 0.5'"
    assert told(item) == ("aborted", None, f"{remedy}{named}")
    assert not item.infra and not item.again


@pytest.mark.parametrize(
    ("grader", "ended"),
    [
        ("no-such-grader", "exit code 127"), ("echo collected 12 items; kill -KILL $$", "killed by SIGKILL"),
        ("echo score: 0.5; exit 1", "exit code 1"), ("false", "exit code 1"), ("echo 1; exit 75", "exit code 75"),
    ],
)
def test_a_grader_that_failed_is_the_worlds_failure(stub: ControlStub, grader: str, ended: str) -> None:
    item = run_program(Program(("true",), reward_cmd=grader), ["t"], retries=0)[0]
    assert (item.outcome, item.reward, item.infra) == ("aborted", None, True)
    assert (item.reason or "").startswith(ended if "75" in grader else FAILED.format(ended))
    assert stub.episodes["ep-0"]["cause"] == "infra"


def test_who_prints_no_number_when_the_work_is_wrong_is_told_once(stub: ControlStub) -> None:
    lines: list[str] = []
    run_program(Program(("true",), reward_cmd="false && echo 1"), ["a", "b"], repeat=2, retries=1, say=lines.append)
    (line,) = lines
    assert line.endswith("If that is how it says that the work is wrong, only successes are trained: add || echo 0")
    assert once("true", reward_cmd="false && echo 1 || echo 0").reward == 0.0
    lines.clear()
    run_program(Program(("false",), reward_from="stdout"), ["a", "b"], say=lines.append)
    (line,) = lines
    assert line.endswith("only successes are trained: have it give 0 then")
    for earns, remedy in (
        (Program(("true",), reward_from="stdout"), "have it give 0 then"),
        (Program(("true",), reward_cmd="true"), "have it print 0 then"),
        (Program(("true",), reward_cmd="if false; then echo 1; fi"), "have it print 0 then"),
    ):
        lines.clear()
        run_program(earns, ["a", "b"], say=lines.append)
        (line,) = lines
        assert line.endswith(f"only successes are trained: {remedy}")
    lines.clear()
    run_program(Program(("false",)), ["a"], say=lines.append)
    assert not lines


def test_a_program_that_rewards_itself_is_believed(stub: ControlStub) -> None:
    assert told(once(PYTHON, "-c", REWARD_ITSELF)) == ("rewarded", 0.25, None)
    steps = "import ajet_sdk; ajet_sdk.reward(0.25, final=False); ajet_sdk.reward(0.5, final=False); exit(3)"
    assert told(once(PYTHON, "-c", steps)) == ("rewarded", 0.75, None)
    assert stub.episodes["ep-1"]["state"] == "ready"
    assert told(once(PYTHON, "-c", "import ajet_sdk; ajet_sdk.abort('no')")) == ("aborted", None, "no")


def test_unless_the_reward_was_asked_for_elsewhere(stub: ControlStub) -> None:
    assert told(once(PYTHON, "-c", REWARD_ITSELF, reward_from="exit-code")) == ("rewarded", 1.0, None)
    assert told(once(PYTHON, "-c", REWARD_ITSELF, reward_from="stdout")) == ("rewarded", 7.0, None)


def test_the_environment(stub: ControlStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AJET_API_KEY", "an-admin-secret")
    monkeypatch.setenv("AJET_ADMIN_SECRET", "of a proxy")
    monkeypatch.setenv("AJET_UPSTREAM_KEY", "of its engines")
    monkeypatch.setenv("AJET_TASK", "of an outer episode")
    seen = tmp_path / "env"
    program = Program(("sh", "-c", f"env > {seen}; pwd"), cwd=str(tmp_path), env={"MINE": "yes", "AJET_TASK": "no"})
    lines: list[bytes] = []
    run_program(program, ["sum/1"], on_output=lambda episode, stream, line: lines.append(line))
    env = dict(line.split("=", 1) for line in seen.read_text().splitlines() if "=" in line)
    assert env["OPENAI_BASE_URL"] == env["OPENAI_API_BASE"] == f"{stub.url}/v1"
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == "ajet-ep-0"
    assert (env["AJET_EPISODE"], env["AJET_TASK"], env["MINE"]) == ("ep-0", "sum/1", "yes")
    assert env["AJET_EXTRA"] == "from-the-proxy"
    assert env["PATH"] == os.environ["PATH"]
    assert not {"AJET_API_KEY", "AJET_ADMIN_SECRET", "AJET_UPSTREAM_KEY"} & set(env)
    assert lines == [f"{tmp_path}\n".encode()]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node on the PATH")
def test_a_program_in_another_language(stub: ControlStub) -> None:
    script = (
        "fetch(process.env.AJET_PROXY_URL + '/ajet/v1/episodes/' + process.env.AJET_EPISODE, "
        "{headers: {authorization: 'Bearer ' + process.env.OPENAI_API_KEY}}).then(r => r.json())"
        ".then(r => { console.log(r.task === process.env.AJET_TASK ? 0.5 : 0); process.exit(0) })"
    )
    node = str(shutil.which("node"))
    assert told(once(node, "-e", script, reward_from="stdout")) == ("rewarded", 0.5, None)


def test_many_at_once_over_several_tasks(stub: ControlStub) -> None:
    seen: list[tuple[str, str]] = []
    program = Program(("sh", "-c", 'echo "$AJET_TASK"; test "$AJET_TASK" = a'))
    results = run_program(
        program, ["a", "b"], repeat=4, parallel=4, model="m", agent_name="x", eval=True,
        on_output=lambda episode, stream, line: seen.append((episode.id, stream)),
    )
    assert [(item.task, item.reward) for item in results] == [("a", 1.0)] * 4 + [("b", 0.0)] * 4
    assert sorted(seen) == sorted((f"ep-{number}", "stdout") for number in range(8))
    records = stub.episodes.values()
    assert {(record["model"], record["agent"], record["eval"]) for record in records} == {("m", "x", True)}


def test_a_program_that_is_not_there(stub: ControlStub) -> None:
    outcome, _, reason = told(once("no-such-program-anywhere"))
    assert outcome == "aborted"
    assert "No such file" in (reason or "")


def test_what_cannot_be_run_is_said_before_anything_is(stub: ControlStub) -> None:
    for wrong in ({"argv": ()}, {"argv": "true"}, {"argv": ("x",), "reward_from": "luck"},
                  {"argv": ("x",), "reward_from": "file", "reward_cmd": "echo 1"}):
        with pytest.raises(errors.BadRequest):
            Program(**wrong)  # type: ignore[arg-type]
    assert not stub.heard


def test_a_program_whose_episode_is_discarded_is_ended(stub: ControlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "WATCH_S", 0.1)

    def discarding(episode: Any, stream: str, line: bytes) -> None:
        stub.discard(episode.id, "wall_timeout")

    with (
        ajet_sdk.Client() as client,
        ajet_sdk.episode("t") as episode,
        ProgramAgent(Program(LASTS), client, discarding) as agent,
        pytest.raises(errors.Conflict, match="wall_timeout"),
    ):
        agent("t", episode)


def test_a_callback_that_raises_in_the_watch_ends_the_run_and_not_the_watch(
    stub: ControlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program whose episode is discarded is ended as ever."""
    monkeypatch.setattr(program, "ENGINE_S", 0.1)
    monkeypatch.setattr(program, "WATCH_S", 0.1)
    told = threading.Event()
    stub.says = lambda heard: DROP if heard.path.endswith("/status") and not told.is_set() else None

    def say(line: str) -> None:
        told.set()
        raise ZeroDivisionError(line)

    def discarding(episode: Any, stream: str, line: bytes) -> None:
        assert told.wait(LONG_S)
        stub.discard(episode.id, "wall_timeout")

    with pytest.raises(ZeroDivisionError, match="does not answer any more"):
        run_program(Program(LASTS), ["a", "b"], parallel=1, on_output=discarding, say=say)
    assert len(stub.episodes) == 1


def test_stopping_ends_programs_and_lets_none_begin(stub: ControlStub) -> None:
    with ajet_sdk.Client() as client, ajet_sdk.episode("t") as episode:
        agent = ProgramAgent(Program(LASTS), client, lambda *said: threading.Thread(target=agent.stop).start())
        for _ in range(2):
            with pytest.raises(errors.Conflict, match="interrupted"):
                agent("t", episode)


@pytest.mark.parametrize(
    ("url", "before", "after"),
    [
        ("http://127.0.0.1:1/v1", {}, ("127.0.0.1", "127.0.0.1")),
        ("http://[::1]:1/v1", {"NO_PROXY": "a,b"}, ("a,b,::1", "a,b,::1")),
        ("http://localhost", {"NO_PROXY": "a", "no_proxy": "localhost"}, ("a,localhost", "localhost")),
        ("http://127.0.0.1:1", {"no_proxy": "*"}, (None, "*")),
        ("http://gpu:1", {"no_proxy": "a"}, (None, "a")),
    ],
)
def test_this_machine_is_reached_without_a_proxy(
    url: str, before: dict[str, str], after: tuple[str | None, str | None]
) -> None:
    env = reaching({"HTTP_PROXY": "p", **before}, url)
    assert (env.get("NO_PROXY"), env.get("no_proxy"), env["HTTP_PROXY"]) == (*after, "p")


def test_the_variable_that_may_stand_between() -> None:
    environ = {"HTTP_PROXY": "a", "https_proxy": "", "ALL_PROXY": "b"}
    found = [proxy_variable(url, environ) for url in ("http://gpu:1", "https://gpu:1", "http://localhost:1")]
    assert found == ["HTTP_PROXY", "ALL_PROXY", None]


# ---- failures of the world, and programs that change


def test_a_line_of_a_file_is_in_the_environment(stub: ControlStub, tmp_path: Path) -> None:
    line = Line("sum/1", '{"id": "sum/1", "q": "1 + 1"}')
    program = Program(("sh", "-c", f'printf "%s|%s" "$AJET_TASK" "$AJET_TASK_JSON" > {tmp_path}/seen'))
    assert [item.task for item in run_program(program, [line])] == ["sum/1"]
    assert stub.episodes["ep-0"]["task"] == "sum/1"
    assert (tmp_path / "seen").read_text() == 'sum/1|{"id": "sum/1", "q": "1 + 1"}'


def test_a_program_begins_anew_when_its_file_changes(stub: ControlStub, tmp_path: Path) -> None:
    file, lines, begun = tmp_path / "agent.sh", list[str](), set[str]()
    file.write_text(LASTS[2])

    def edit(episode: Any, stream: str, line: bytes) -> None:
        begun.add(episode.id)
        if len(begun) == 2:
            (tmp_path / "new").write_text("exit 0")
            (tmp_path / "new").rename(file)

    results = run_program(
        Program(("sh", str(file))), ["a", "b"], parallel=2, retries=0, watch=True, play="d", say=lines.append,
        on_output=edit,
    )
    assert lines == [
        f"watching {file}",
        f"{file} has changed: the program begins anew",
    ]  # fmt: skip
    told = sorted((item.task, item.outcome, item.reason, item.infra, item.again) for item in results)
    assert told == [
        ("a", "aborted", "the program changed", True, True), ("a", "rewarded", None, False, False),
        ("b", "aborted", "the program changed", True, True), ("b", "rewarded", None, False, False),
    ]  # fmt: skip
    old = [record for record in stub.episodes.values() if record["state"] == "discarded"]
    assert [(record["detail"], record["cause"]) for record in old] == [("the program changed", "infra")] * 2


@pytest.fixture
def script(stub: ControlStub, tmp_path: Path) -> Path:
    """A program's file."""
    path = tmp_path / "agent.sh"
    path.write_text("exit 1")
    return path


def revisions(stub: ControlStub) -> list[tuple[str, bool, float | None]]:
    """Of each episode its state, whether its revision is that of the last one, and its reward."""
    records = list(stub.episodes.values())
    return [(one["state"], one["revision"] == records[-1]["revision"], one["reward"]) for one in records]


@pytest.mark.parametrize("play", [None, "d"])
def test_code_that_changes_while_an_episode_is_opened_plays_another_one(
    stub: ControlStub, script: Path, play: str | None
) -> None:
    stub.on_open = lambda record: record["episode"] == "ep-0" and script.write_text("exit 0")
    (item,) = run_program(Program(("sh", str(script))), ["a"], play=play)
    assert (item.reward, item.episode) == (1.0, "ep-1"), "nothing had failed, and nothing is played again"
    assert revisions(stub) == [("discarded", False, None), ("ready", True, 1.0)]
    assert (stub.episodes["ep-0"]["detail"], stub.episodes["ep-0"]["cause"]) == (membership.CHANGED, "infra")
    ids = [heard.body.get("id") for heard in stub.heard if heard.path.endswith("/episodes")]
    assert play is None or len(set(ids)) == 2


def edited_once(script: Path, monkeypatch: pytest.MonkeyPatch, *, before: bool, quick_s: float = LONG_S) -> None:
    """The file is edited just before, or after, the first program begins, which has read it after `quick_s` then."""
    done: list[int] = []

    class Edited(Child):
        def __init__(self, *args: Any, **more: Any) -> None:
            if before and not done:
                script.write_text("exit 0")
            super().__init__(*args, **more)

        def wait(self) -> int:
            if not before and not done:
                script.write_text("exit 0")
                monkeypatch.setattr(program, "QUICK_S", quick_s)
            done.append(1)
            return super().wait()

    monkeypatch.setattr(program, "Child", Edited)


@pytest.mark.parametrize("how", [{}, {"play": "d"}, {"play": "d", "watch": True}])
@pytest.mark.parametrize("before", [True, False])
def test_code_that_changes_as_its_program_begins_is_sealed_under_no_other_revision(
    stub: ControlStub, script: Path, monkeypatch: pytest.MonkeyPatch, before: bool, how: Any
) -> None:
    edited_once(script, monkeypatch, before=before)
    first, second = run_program(Program(("sh", str(script))), ["a"], retries=0, **how)
    assert (first.reason, first.infra, first.again, second.reward) == ("the program changed", True, True, 1.0)
    assert revisions(stub) == [("discarded", False, None), ("ready", True, 1.0)]


def test_a_program_that_lasts_is_looked_at_once_it_has_read_its_code(
    stub: ControlStub, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text("sleep 3600")
    edited_once(script, monkeypatch, before=False, quick_s=0.2)
    first, second = run_program(Program(("sh", str(script))), ["a"])
    assert (first.reason, first.again, second.reward) == ("the program changed", True, 1.0)


def test_what_it_does_later_is_under_the_code_that_it_began_with(
    stub: ControlStub, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "QUICK_S", 0.0)
    later, begun, ticks = tmp_path / "later", list[bytes](), list[bytes]()

    def tick() -> None:
        ticks.extend(begun)
        if len(ticks) == 2:  # so that it was looked at once
            later.touch()

    script.write_text(f"echo; until test -e {later}; do sleep 0.1; done; echo '# more' >> {script}; exit 0\n")
    played = Program(("sh", str(script)))
    code, said = of_program(played.argv, None), lambda episode, stream, line: begun.append(line)
    with (
        ajet_sdk.Client() as client, ajet_sdk.episode("t", revision=code()) as episode,
        ProgramAgent(played, client, said, code=code, tick=tick) as agent,
    ):
        agent("t", episode)
    assert episode.outcome.reward == 1.0


def test_a_program_that_writes_its_own_code_ends_the_run(stub: ControlStub, script: Path) -> None:
    script.write_text(f"echo '# more' >> {script}; exit 0\n")
    with pytest.raises(errors.AjetError, match="changed 5 times in a row as it began"):
        run_program(Program(("sh", str(script))), ["a"])
    (item,) = run_program(Program(("sh", str(script))), ["a"], revision="r1")
    assert item.reward == 1.0


def test_a_program_that_fails_at_once_again_and_again_waits_for_its_file(stub: ControlStub, tmp_path: Path) -> None:
    file, lines, noise = tmp_path / "agent.sh", list[str](), list[bytes]()
    file.write_text("echo broken >&2; exit 1")

    def say(line: str) -> None:
        lines.append(line)
        if "Nothing more begins" in line:
            file.write_text("exit 0")

    program = Program(("sh", str(file)))
    results = run_program(
        program, [f"t{number}" for number in range(20)], parallel=1, watch=True, play="d", say=say,
        on_output=lambda episode, stream, line: noise.append(line),
    )
    assert len(lines) == 3 and b"broken\n" in noise
    assert sorted(item.reward for item in results if item.reward is not None) == [0.0] * 3 + [1.0] * 17


def test_without_a_watch_such_a_program_ends_the_run(stub: ControlStub) -> None:
    program, tasks = Program(("sh", "-c", "exit 1")), [f"t{number}" for number in range(20)]
    with pytest.raises(errors.AjetError, match="the program failed 3 times in a row within"):
        run_program(program, tasks, play="d")
    assert len(stub.episodes) == 3
    with pytest.raises(errors.AjetError, match="the program failed 4 times in a row within"):
        run_program(program, tasks, play="more", parallel=4)
    assert len(run_program(program, tasks[:5])) == 5
    now_and_then = Program(("sh", "-c", 'case "$AJET_TASK" in *[258]) exit 0; esac; exit 1'))
    assert len(run_program(now_and_then, tasks[:9], play="now and then", parallel=1)) == 9


def test_programs_that_fail_while_the_proxy_is_away_say_nothing_of_their_code(stub: ControlStub) -> None:
    away = set[str]()

    def fault(heard: Any) -> str | None:
        if heard.method != "GET" or "/episodes/" not in heard.path or heard.path in away:
            return None
        away.add(heard.path)
        return DROP

    stub.says = fault
    results = run_program(Program(("sh", "-c", "exit 1")), [f"t{number}" for number in range(5)], play="d")
    assert [item.reward for item in results] == [0.0] * 5 and len(away) == 5


def test_what_has_no_file_cannot_be_watched(stub: ControlStub) -> None:
    with pytest.raises(errors.BadRequest, match="nothing to watch"):
        run_program(Program(("sh", "-c", "exit 1")), ["t"], watch=True)
