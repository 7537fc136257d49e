"""The command as a user meets it: quick help, one line for a mistake, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.cli import cli, configured, main
from ajet_proxy.core.identity.keys import key_id
from tests.kit.proxy_process import PROXY
from tests.kit.source import ROOT
from tests.kit.steps import processor_s
from tests.kit.strategies import make_call


def run(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AJET_")}
    return subprocess.run(
        [str(PROXY), *arguments], input=stdin, capture_output=True, text=True, env=clean | env, timeout=300, check=False
    )


@pytest.mark.parametrize("command", [(), ("serve",), ("merge",), ("replay",), ("doctor",), ("install-service",)])
def test_help_is_there_at_once(command: tuple[str, ...]) -> None:
    done, worked = processor_s(lambda: run(*command, "--help"))
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ajet-proxy")
    assert worked < 0.5


def test_the_command_line_reads_settings_without_the_ledger() -> None:
    code = "import sys, ajet_proxy.cli; print(*(name for name in sys.modules if name.startswith('ajet_proxy.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if name.startswith(("ajet_proxy.core.ledger", "ajet_proxy.io"))} == set(), loaded


def test_commands_for_keys_take_the_one_setting_that_they_use() -> None:
    for command in ("issue-key", "rotate-secret", "revoke"):
        words = run(command, "--help").stdout.split()
        assert {"--config", "--data-dir"} <= set(words)
        assert not {"--listen", "--upstream", "--group-size"} & set(words)
    assert run("issue-key", "--scope", "admin", "--listen", "127.0.0.1:0").returncode == 2


def test_the_sdk_alone_is_no_daemon_and_says_so() -> None:
    """`pip install .` brings the command and not what it needs."""
    code = "import sys; sys.modules['msgspec'] = None; import ajet_proxy.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "ajet-proxy: there is no msgspec here: the daemon is installed by pip install '.[proxy]'\n"


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("ajet-proxy 0.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing command. (see 'ajet-proxy --help')"),
        (("srve",), "No such command 'srve'"),
        (("serve", "--workers", "x"), "(see 'ajet-proxy serve --help')"),
        (("serve", "--lisen", "x"), "--listen"),
        (("serve", "--group-size", "x"), "group-size"),
        (("serve", "--listen", "0.0.0.0:1"), "needs an admin secret"),
        (("serve", "extra"), "unexpected extra argument"),
        (("merge", "/nonexistent.jsonl"), "nonexistent.jsonl"),
        (("merge", "-", "--policy", "loose"), "strict"),
        (("replay", "/nonexistent"), "does not exist"),
        (("merge", "-", "--policy", "off", "--tree"), "--policy off does not: choose one"),
        (("merge", "-", "--by", "group"), "needs --tree"),
        (("replay", ".", "--by", "episode"), "needs --tree"),
        (("replay", ".", "--tree", "--by", "task"), "'episode', 'group'"),
        (("export", ".", "--by", "group"), "needs --tree"),
        (("export", ".", "--as", "poems"), "poems"),
        (("export", ".", "--state", "happy"), "happy"),
        (("export", ".", "--tree", "--format", "parquet"), "--tree writes samples as JSON lines"),
        (("export", ".", "--tree", "--as", "sft"), "--tree writes samples as JSON lines"),
        (("export", ".", "--min-reward", "nan"), "--min-reward must be a number"),
        (("issue-key", "--scope", "root"), "--scope"),
        (("issue-key", "--scope", "agent", "--ttl", "0"), "--ttl"),
        (("issue-key", "--scope", "agent", "--model", "m"), "--model"),
        (("issue-key", "--scope", "agent", "--ttl", "nan"), "--ttl"),
        (("issue-key", "--scope", "agent", "--ttl", "inf"), "--ttl"),
        (("issue-key", "--scope", "agent", "--tenant", "\udcff"), "--tenant"),
        (("issue-key", "--scope", "trainer", "--model", "\udcff"), "--model"),
        (("revoke", "--tenant", "\udcff"), "--tenant"),
        (("revoke", "--episode", "\udcff"), "--episode"),
        (("revoke", "--key-id", "ajet-x"), "16 hexadecimal digits"),
        (("revoke", "--key-file", "-"), "holds no key"),
        (("revoke", "--tenant", "a", "--data-dir", "/nonexistent"), "/nonexistent holds no proxy's keys"),
        (("rotate-secret", "--data-dir", "/nonexistent"), "/nonexistent holds no proxy's keys"),
        (("install-service", "--print", "--listen", "x"), "HOST:PORT"),
        (("install-service", "--print", "--", "--upsteam", "x"), "(see 'ajet-proxy serve --help')"),
        (("install-service", "--print", "--data-dir", "/x"), "leave out --data-dir"),
        (("install-service", "--print", "--intercept", "local:node"), "a service cannot intercept as local"),
        (("install-service", "--print", "--config", "a.toml"), "absolute paths"),
        (("install-service", "--print", "--", "--config=a.toml"), "absolute paths"),
        (("doctor", "--upstream", "ftp://x"), "upstream must be"),
        (("merge", "-", "--policy", "repair", "--upstream", "http://999.1.1.1:1"), "upstream must be"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [("[" * 200_000, "line 1 is not JSON"), ('{"x":' * 200_000, "line 1 is not JSON"), ("{}", "line 1: token_ids")],
)
def test_a_line_that_is_no_call_is_said_in_one_line(line: str, words: str) -> None:
    done = run("merge", "-", stdin=line)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert words in done.stderr


def test_what_json_can_say_and_utf8_cannot_is_merged_all_the_same() -> None:
    call = make_call("\ud800", (1, 2), (3,))
    done = run("merge", "-", stdin=json.dumps(call.to_json()))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["calls"] == ["\ud800"]


@pytest.mark.parametrize("key", ["abc\n", "ключ"])
def test_a_key_that_no_header_can_carry_is_said_in_one_line(key: str) -> None:
    for command in (("doctor",), ("merge", "-", "--policy", "repair", "--upstream", "http://127.0.0.1:1")):
        done = run(*command, AJET_UPSTREAM_KEY=key)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "AJET_UPSTREAM_KEY holds characters" in done.stderr


def test_what_is_no_text_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "calls").write_bytes(b"\n\xff\xfe")
    done = run("merge", str(tmp_path / "calls"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "line 2 is not UTF-8 text" in done.stderr


def test_files_of_another_user_are_an_error_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/data/lock")

    monkeypatch.setattr(cli, "main", refuse)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said == "ajet-proxy: Permission denied: /data/lock: run it as the user that runs the proxy, or as root\n"


def test_a_part_that_is_not_installed_is_named() -> None:
    program = """import sys; sys.modules["msgpack"] = None; sys.argv = ["ajet-proxy", "merge", "-"]
from ajet_proxy.cli import main; main()"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    said = "ajet-proxy: msgpack is not installed here: the daemon's part is ajet[proxy], for Python 3.12 or newer\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_a_key_can_be_issued_and_its_secret_is_private(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    done = run("issue-key", "--scope", "trainer", "--data-dir", str(data_dir))
    assert done.returncode == 0
    assert done.stdout.startswith("ajet-")
    assert f"no proxy has used {data_dir} yet" in done.stderr
    assert run("issue-key", "--scope", "trainer", "--data-dir", str(data_dir)).stderr == ""
    assert (data_dir / "secret").stat().st_mode & 0o777 == 0o600
    assert data_dir.stat().st_mode & 0o777 == 0o700


def test_secrets_are_rotated_and_keys_revoked_without_naming_them(tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path))
    key = run("issue-key", "--scope", "agent", "--tenant", "t", *where).stdout.strip()
    secret = (tmp_path / "secret").read_bytes()
    rotated = run("rotate-secret", *where)
    assert rotated.returncode == 0
    assert (tmp_path / "secret").read_bytes()[32:] == secret
    assert "keys that an older one signed are valid until they expire" in rotated.stdout
    (tmp_path / "key").write_text(key + "\n")
    in_file = ("--key-file", str(tmp_path / "key"))
    for arguments in (in_file, ("--tenant", "t"), ("--episode", "ep"), ("--key-id", "1f" * 8)):
        done = run("revoke", *arguments, *where)
        assert (done.returncode, done.stderr) == (0, "")
        assert key not in done.stdout
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    no_text = run("revoke", *in_file, *where)
    assert (no_text.returncode, no_text.stderr.count("\n")) == (2, 1)
    assert "holds no key" in no_text.stderr
    kinds = [json.loads(line)[:2] for line in (tmp_path / "revoked").read_text().splitlines()]
    assert kinds == [["key", key_id(key)], ["tenant", "t"], ["episode", "ep"], ["key", "1f" * 8]]
    for arguments in ((), ("--tenant", "t", "--episode", "ep")):
        assert run("revoke", *arguments, *where).returncode == 2
    assert "earlier keys are void" in run("rotate-secret", "--drop-old", *where).stdout


def test_the_unit_can_be_printed_and_written(tmp_path: Path) -> None:
    printed = run("install-service", "--user", "--print", "--drain-s", "5")
    assert printed.returncode == 0
    assert "TimeoutStopSec=35" in printed.stdout
    written = run("install-service", "--user", "--drain-s", "5", XDG_CONFIG_HOME=str(tmp_path))
    assert written.returncode == 0
    assert "systemctl --user daemon-reload" in written.stdout
    assert (tmp_path / "systemd/user/ajet-proxy.service").read_text() == printed.stdout


def test_the_services_settings_are_those_of_its_environment_file(tmp_path: Path) -> None:
    exposed = ("install-service", "--user", "--print", "--", "--listen", "0.0.0.0:8484", "--insecure")
    shell = {"XDG_CONFIG_HOME": str(tmp_path), "AJET_ADMIN_SECRET": "of the shell alone", "AJET_DRAIN_S": "1"}
    refused = run(*exposed, **shell)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "needs an admin secret" in refused.stderr
    assert f"the service has only the variables in {tmp_path}/ajet/proxy.env" in refused.stderr
    (tmp_path / "ajet").mkdir()
    (tmp_path / "ajet/proxy.env").write_text("# ours\nAJET_ADMIN_SECRET='sixteen characters'\nAJET_DRAIN_S=600\n")
    printed = run(*exposed, **shell)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert "TimeoutStopSec=630" in printed.stdout
    assert "sixteen characters" not in printed.stdout


def test_the_service_has_its_own_data_directory_whoever_names_another(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('data_dir = "/x"')
    (tmp_path / "ajet").mkdir()
    (tmp_path / "ajet/proxy.env").write_text("AJET_DATA_DIR=/x")
    install = ("install-service", "--user", "--print")
    for done in (
        run(*install, "--", f"--config={tmp_path}/c.toml"), run(*install, XDG_CONFIG_HOME=str(tmp_path)),
    ):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "keeps its data in systemd's state directory" in done.stderr


def test_doctor_exits_1_on_a_fault(tmp_path: Path) -> None:
    done = run("doctor", "--data-dir", str(tmp_path / "d"), "--upstream", "http://127.0.0.1:9", "--json")
    assert done.returncode == 1
    assert '"ok": false' in done.stdout
    assert run("doctor", "--data-dir", str(tmp_path / "d"), "--listen", "127.0.0.1:0").returncode == 0


def test_an_option_that_is_0_is_one_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AJET_READ_TIMEOUT", "5")
    assert configured(None, {"read_timeout": "0", "workers": None, "upstream": (), "insecure": False}).read_timeout == 0
    assert configured(None, {"read_timeout": None}).read_timeout == 5
