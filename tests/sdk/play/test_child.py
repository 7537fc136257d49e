"""Child processes: all output, the exit code, and nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ajet_sdk.play.child import LINE_LIMIT, Child
from ajet_sdk.rewards.sources import describe
from tests.kit.patience import LONG_S, until

PYTHON = sys.executable


def run(*argv: str, env: dict[str, str] | None = None) -> tuple[int, bytes, bytes]:
    said: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    child = Child(argv, {**os.environ, **(env or {})}, lambda stream, line: said[stream].append(line))
    return child.wait(), b"".join(said["stdout"]), b"".join(said["stderr"])


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that is dead and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone, or it goes while it is read
        return False


def until_dead(pid: int) -> bool:
    return until(lambda: not alive(pid))


def test_empty_input_output_and_exit_code() -> None:
    assert run("sh", "-c", "cat; echo out; echo err >&2; printf tail; exit 3") == (3, b"out\ntail", b"err\n")
    assert run("sh", "-c", "kill -KILL $$")[0] == -signal.SIGKILL, "a signal is a negative code"


def test_all_of_a_large_output_arrives_in_order() -> None:
    _, out, _ = run(PYTHON, "-c", f"print('x' * {3 * LINE_LIMIT}); [print(i) for i in range(20000)]")
    lines = out.split(b"\n")
    assert lines[0] == b"x" * 3 * LINE_LIMIT
    assert lines[1:-1] == [str(number).encode() for number in range(20000)]


def test_what_cannot_be_started_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        run("no-such-program-anywhere")


@pytest.mark.parametrize("leaves", ["sleep", "timeout 9999 sleep"])
def test_what_a_program_leaves_behind_is_killed(leaves: str) -> None:
    """Also what has a process group of its own."""
    code, out, _ = run("sh", "-c", f"{leaves} 3600 & echo $!; sleep 0.3; exit 0")
    assert code == 0
    assert until_dead(int(out))


@pytest.mark.parametrize("does", ["time.sleep(3600)", "while True: os.write(1, b'y' * 65536)"], ids=["pipe", "flood"])
def test_what_is_held_from_outside_the_session_does_not_hold_us(does: str) -> None:
    escape = "import os, time\nends = os.pipe()\nif os.fork() == 0:\n os.setsid(); print(os.getpid(), flush=True)"
    code, out, _ = run(PYTHON, "-c", f"{escape}; os.write(ends[1], b'.')\n {does}\nos.read(ends[0], 1); os._exit(0)")
    assert code == 0
    with suppress(ProcessLookupError):  # the closed pipe ends a flood
        os.kill(int(out.split(b"\n")[0]), signal.SIGKILL)


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
@pytest.mark.parametrize("starts", ["sleep", "timeout 9999 sleep"])
def test_ending_a_program_ends_all_of_it(trap: str, starts: str) -> None:
    out: list[bytes] = []
    ignoring = ("sh", "-c", f"{trap}{starts} 3600 & sleep 0.3; echo $!; wait; sleep 3600")
    child = Child(ignoring, os.environ, lambda stream, line: out.append(line))
    codes: list[int] = []
    waiter = threading.Thread(target=lambda: codes.append(child.wait()))
    waiter.start()
    assert until(lambda: out)
    child.ask_to_end()
    child.end(0.3 if trap else LONG_S)
    waiter.join()
    assert codes == [-signal.SIGKILL if trap else -signal.SIGTERM]
    assert until_dead(int(out[0]))
    child.end(0.0)  # again, when it is gone, does nothing


def test_all_output_is_handed_on_however_slow_the_taker(tmp_path: Path) -> None:
    pid, seen = tmp_path / "pid", list[bytes]()

    def slowly(stream: str, line: bytes) -> None:
        seen.append(line)
        assert until(lambda: not alive(int(pid.read_text())))

    child = Child(("sh", "-c", f"echo $$ > {pid}; exec seq 100"), os.environ, slowly)
    assert child.wait() == 0
    assert seen == [f"{number}\n".encode() for number in range(1, 101)]


def test_what_a_callback_raises_ends_the_program_and_is_raised() -> None:
    def broken(stream: str, line: bytes) -> None:
        raise LookupError("no place for it")

    chatty = ("sh", "-c", "while :; do echo x || exit; sleep 0.01; done")
    child = Child(chatty, os.environ, broken)
    with pytest.raises(LookupError, match="no place"):
        child.wait()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_program_whose_output_cannot_be_read_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_thread(thread: threading.Thread) -> None:
        until(pid.exists)
        raise RuntimeError("can't start new thread")

    pid, before = tmp_path / "pid", open_files()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="thread"):
        run("sh", "-c", f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 3600")
    assert not alive(int(pid.read_text()))
    assert open_files() == before


def test_nothing_stays_open() -> None:
    before = open_files()
    for _ in range(3):
        run("sh", "-c", "echo x")
    assert open_files() == before


def test_codes_in_words() -> None:
    assert [describe(code) for code in (0, 3, -11, -63)] == [
        "exit code 0", "exit code 3", "killed by SIGSEGV", "killed by signal 63",
    ]
