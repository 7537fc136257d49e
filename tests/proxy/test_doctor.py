"""The doctor against an engine that is well, ill, elsewhere, or no engine at all."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ajet_proxy import doctor
from ajet_proxy.doctor import LOW_DISK, examine
from ajet_proxy.io.http import keyring
from ajet_proxy.settings import Config
from ajet_sdk.findings import Finding, as_json, as_text
from ajet_sdk.ports import listener
from ajet_sdk.untrainable import GIVES_LOGPROBS, GIVES_TOKEN_IDS
from tests.kit.answering import saying
from tests.kit.certificates import Authority
from tests.kit.engine_sampling import Sampling
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.ports import free_port
from tests.proxy.io.capture.test_continuity import Deaf
from tests.proxy.serving import serving


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens on the proxy's port, whatever else runs on this host."""
    monkeypatch.setattr(doctor, "listener", lambda port: None)


def run(config: Config) -> list[Finding]:
    return asyncio.run(examine(config))


def faults(findings: list[Finding]) -> list[str]:
    return [f.message for f in findings if f.level == "fault"]


async def examined(stub: EngineStub, data_dir: Path, fault: str = "", **settings: Any) -> list[Finding]:
    """The findings on an engine of which each answer has a `fault`."""
    async with stub:
        stub.faults += [Fault(fault, times=99)] if fault else []
        return await examine(Config(upstream=(stub.url + "/v1",), data_dir=str(data_dir), **settings))


async def test_a_good_engine_has_no_faults(tmp_path: Path) -> None:
    findings = await examined(EngineStub(), tmp_path / "new")
    assert faults(findings) == []
    text = as_text(findings)
    assert "serves stub" in text
    assert "vLLM 0.31.0" in text
    assert "exact token ids" in text
    assert "clock agrees" in text
    assert "takes history as exact ids" in text
    assert json.loads(as_json(findings))["ok"] is True
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no_token_ids", "no token ids"),
        ("no_logprobs", "0 logprobs for 2 tokens"),
        ("status", "answered 500"),
        ("not_vllm", "no token ids"),
        ("silent_close", "cannot be reached"),
    ],
)
async def test_an_ill_engine_is_named_with_advice(tmp_path: Path, kind: str, message: str) -> None:
    findings = await examined(EngineStub(), tmp_path, kind)
    found = [f for f in findings if f.level == "fault"]
    assert len(found) == 1
    assert message in found[0].message
    assert found[0].advice
    assert json.loads(as_json(findings))["ok"] is False


@pytest.mark.parametrize(("kind", "what", "remedy"), [
    ("refuses_ids", "return_token_ids", GIVES_TOKEN_IDS), ("refuses_logprobs", "logprobs", GIVES_LOGPROBS),
    ("refuses_both", "return_token_ids and logprobs", GIVES_TOKEN_IDS),
])  # fmt: skip
async def test_what_an_engine_refuses_is_named_with_the_remedy(
    tmp_path: Path, kind: str, what: str, remedy: str
) -> None:
    (found,) = (f for f in await examined(EngineStub(), tmp_path, kind) if f.level == "fault")
    assert found.message.startswith(f"refuses {what}, so every episode would be discarded as incomplete_call: ")
    assert "Unknown parameter" in found.message
    assert found.advice == remedy
    assert "vLLM" in remedy


async def test_an_engine_that_is_down(tmp_path: Path) -> None:
    findings = await examine(Config(upstream=(f"http://127.0.0.1:{free_port()}",), data_dir=str(tmp_path)))
    assert "cannot be reached" in faults(findings)[0]


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        (EngineStub(tokenizes=False), "renders no conversations"),
        (EngineStub(given_ids="ignored"), "takes no prompt ids"),
        (EngineStub(given_ids="refused"), "takes no prompt ids"),
        (Deaf(), "its /v1/responses takes no prompt ids"),
    ],
)
async def test_an_engine_without_exact_history_is_a_warning(tmp_path: Path, stub: EngineStub, words: str) -> None:
    for continuity in ("auto", "off"):
        told = [f for f in await examined(stub, tmp_path, continuity=continuity) if words in f.message]
        assert [f.level for f in told] == ["warning"] * (continuity == "auto")
        assert all("--continuity off" in f.advice for f in told)


@pytest.mark.parametrize("settings", [{}, {"admin_secret": "a secret of sixteen"}], ids=["open", "with keys"])
async def test_a_proxy_in_the_place_of_the_engine_is_a_fault(tmp_path: Path, settings: dict[str, str]) -> None:
    async with EngineStub() as stub, serving(tmp_path / "data", upstream=(stub.url,), **settings) as client:
        findings = await examine(Config(upstream=(client.app.url + "/v1",), data_dir=str(tmp_path / "new")))
        assert faults(findings) == ["is an ajet-proxy and no engine"]
        assert not any(request.path.startswith("/v1") for request in stub.requests)


async def test_an_engine_that_redirects_is_a_fault(tmp_path: Path) -> None:
    async with EngineStub() as other, saying("/v1/models", 307, Location=f"{other.url}/v1/models") as url:
        findings = await examine(Config(upstream=(url,), data_dir=str(tmp_path / "new")))
        assert faults(findings) == ["GET /v1/models answered 307 without a model"]
        assert other.requests == []


async def test_no_engine_is_a_warning(tmp_path: Path) -> None:
    findings = await examine(Config(data_dir=str(tmp_path)))
    assert faults(findings) == []
    assert "until a trainer announces" in as_text(findings)


class Restless(EngineStub):
    """An engine without the routes that freeze it."""

    async def _is_paused(self, request: web.Request) -> web.Response:
        raise web.HTTPNotFound


async def test_pausing_needs_an_engine_that_can(tmp_path: Path) -> None:
    assert "it has no /pause" in faults(await examined(Restless(), tmp_path, gate_mode="pause"))[0]
    said = as_text(await examined(Restless(), tmp_path))
    assert "takes no weights of a trainer" in said and "VLLM_SERVER_DEV_MODE=1; for episodes alone it is well" in said


async def test_a_journal_that_is_gone_is_a_fault(tmp_path: Path) -> None:
    async with serving(tmp_path):
        pass
    config = Config(data_dir=str(tmp_path))
    assert any((f.check, f.level) == ("journal", "ok") for f in await examine(config))
    shutil.rmtree(tmp_path / "journal")
    (found,) = [f for f in await examine(config) if f.level == "fault"]
    assert found.check == "journal" and "holds no journal" in found.message and "restore it" in found.advice


def test_a_data_directory_out_of_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *, follow_symlinks: bool = True) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    first, *_ = run(Config(data_dir=str(tmp_path)))
    assert (first.level, first.message) == ("fault", f"this user may not look at {tmp_path}")
    assert "as root" in first.advice


def test_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 32)
    secret.chmod(0o644)
    findings = run(Config(data_dir=str(tmp_path)))
    assert f"{secret} is readable by others" in faults(findings)
    assert "others can look into" in as_text(findings)
    not_a_directory = run(Config(data_dir=str(secret)))
    assert "not a directory" in faults(not_a_directory)[0]
    below_a_file = run(Config(data_dir=str(secret / "x")))
    assert "not writable" in faults(below_a_file)[0]

    usage: Any = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=LOW_DISK - 1))
    secret.chmod(0o600)
    tmp_path.chmod(0o700)
    assert "GiB free" in faults(run(Config(data_dir=str(tmp_path))))[0]


def test_files_that_another_user_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "journal").mkdir()
    segment = tmp_path / "journal" / "00000001.log"
    segment.write_bytes(b"")
    assert faults(run(Config(data_dir=str(tmp_path)))) == []
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = list(real(path))
        found[stat.ST_UID] += path == segment
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", lstat)
    (finding,) = (item for item in run(Config(data_dir=str(tmp_path))) if item.level == "fault")
    assert f"such as {segment}" in finding.message
    assert finding.advice == f"chown -R --reference={tmp_path} {tmp_path}"


def test_a_lock_that_this_user_may_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").write_bytes(b"")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert faults(run(Config(data_dir=str(tmp_path)))) == [f"this user may not open {tmp_path / 'lock'}"]


@pytest.mark.parametrize(("file", "data"), [("secret", b""), ("secret", b"short"), ("revoked", b"{")])
def test_keys_that_serve_would_refuse_are_a_fault(tmp_path: Path, file: str, data: bytes) -> None:
    def found() -> list[Finding]:
        return [item for item in run(Config(data_dir=str(tmp_path))) if item.check == "keys"]

    tmp_path.chmod(0o700)
    assert found() == []
    assert not (tmp_path / "secret").exists()
    keyring.ring(tmp_path)
    assert [item.level for item in found()] == ["ok"]
    (tmp_path / file).write_bytes(data)
    (fault,) = found()
    assert (fault.level, fault.message) == ("fault", f"{tmp_path / file} is damaged")
    assert "delete it" in fault.advice


def test_a_secret_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir(mode=0o700)
    assert faults(run(Config(data_dir=str(tmp_path)))) == [f"{tmp_path / 'secret'} cannot be read: Is a directory"]


def test_the_ca_of_interception(tmp_path: Path) -> None:
    def found() -> list[Finding]:
        return [item for item in run(Config(data_dir=str(tmp_path))) if item.check == "interception"]

    ca = tmp_path / "ca"
    assert found() == []
    ca.mkdir(mode=0o700)
    authority = Authority(tmp_path)
    for days, levels in ((32, ["ok"]), (29, ["warning"]), (-1, ["fault"])):
        shutil.copy(authority.sign("mitmproxy-ca", days=days).cert, ca)
        assert [item.level for item in found()] == levels
    assert "certificate holds from" in faults(found())[0]
    (ca / "mitmproxy-ca-cert.pem").write_text("nothing")
    assert "cannot be read" in faults(found())[0]
    (ca / "mitmproxy-ca-cert.pem").unlink()
    (ca / "mitmproxy-ca.pem").write_text("secret")
    (ca / "mitmproxy-ca.pem").chmod(0o604)
    assert len(faults(found())) == 2
    assert "others can read the CA's key" in faults(found())[0]


async def test_a_running_proxy_is_seen_by_its_lock(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as stream:
        assert "no proxy is running" in as_text(await examine(Config(data_dir=str(tmp_path))))
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert "a proxy is running" in as_text(await examine(Config(data_dir=str(tmp_path))))


@pytest.mark.parametrize("folder", [".", "new"])
def test_a_port_that_another_program_has_is_named_unless_a_proxy_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = Config(data_dir=str(tmp_path / folder), listen=f"127.0.0.1:{port}", intercept=("127.0.0.1:0",))
        monkeypatch.setattr(doctor, "listener", listener)
        (found,) = [item for item in run(config) if item.level == "fault"]
        assert f"(process {os.getpid()}) listens on port {port}" in found.message and "--listen" in found.advice
        (tmp_path / folder).mkdir(exist_ok=True)
        with (tmp_path / folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert faults(run(config)) == []


@pytest.mark.parametrize(("sampling", "levels", "words"), [
    (Sampling({}, processed=True), ["ok", "ok"], ["at temperature 1 over the whole vocabulary", "are processed"]),
    (Sampling({}, renders=False), ["ok", "warning"], ["at temperature 1", "logprobs are raw"]),
    (Sampling({"temperature": 0.7, "top_k": 20}, processed=True), ["fault", "ok"],
     ["hidden defaults where agents name no parameter: temperature 0.7, top_k 20", "are processed"]),
    (Sampling({"temperature": 0.7, "top_k": 20}, renders=False), ["fault", "warning"],
     ["no parameter: temperature 0.7, top_k (perhaps), min_p (perhaps)", "logprobs are raw"]),
    (Sampling(status=404), ["warning", "warning"], ["does not tell its defaults", "does not show whether"]),
])  # fmt: skip
async def test_how_an_engine_samples(tmp_path: Path, sampling: Sampling, levels: list[str], words: list[str]) -> None:
    findings = await examined(EngineStub(sampling=sampling), tmp_path)
    found = [item for item in findings if any(word in item.message for word in words)]
    assert [item.level for item in found] == levels
    assert all(bool(item.advice) is (item.level != "ok") for item in found)
    assert ("--generation-config vllm" in as_text(found)) is ("fault" in levels)


async def test_an_engine_that_answers_such_questions_with_no_json(tmp_path: Path) -> None:
    async def models(http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def chat(http: web.Request) -> web.Response:
        count = (await http.json())["max_tokens"]
        choice = {"token_ids": [1] * count, "logprobs": {"content": [{"token": "a", "logprob": -1.0}] * count}}
        return web.json_response({"prompt_token_ids": [1], "choices": [choice]})

    async def other(http: web.Request) -> web.Response:
        return web.Response(text="<html>")

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat), web.post("/{_:.*}", other)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    findings = await examine(Config(upstream=(f"http://{host}:{port}",), data_dir=str(tmp_path)))
    await runner.cleanup()
    assert faults(findings) == []
    assert "does not tell its defaults" in as_text(findings)


@pytest.mark.parametrize("limit", [{}, {"archive_max_age": 1.0}, {"archive_max_bytes": 1}, {"max_disk": 1}])
def test_an_archive_that_nothing_limits_is_a_hint(tmp_path: Path, limit: dict[str, Any]) -> None:
    found = run(Config(data_dir=str(tmp_path), **limit))
    assert [item.level for item in found if item.check == "retention"] == ["warning"] * (not limit)
