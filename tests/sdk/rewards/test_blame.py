"""Whose failure an exception is, by real clients: their own errors, raised by real answers where that is quick."""

from __future__ import annotations

import ast
import asyncio
import builtins
import errno
import http.client
import socket
import subprocess
import urllib.error
from collections.abc import Callable
from email.message import Message
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from ajet_sdk import errors
from ajet_sdk.rewards.blame import WorldFailed, of_the_world, reason_of
from tests.kit.source import ROOT

REQUEST = httpx.Request("POST", "http://engine/v1/chat/completions")
CLIENT = openai.OpenAI(api_key="k", base_url="http://engine/v1")
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
WORLD = (500, 502, 503, 504, 529, 429, 401, 402, 403, 404, 405, 408, 409, 410, 424, 499)
AGENT = (400, 413, 422)


def answered(status: int) -> openai.APIStatusError:
    """The error that the client raises for an answer with this status."""
    return CLIENT._make_status_error_from_response(httpx.Response(status, request=REQUEST, json={}))


def by_httpx(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(status, request=REQUEST))


def by_aiohttp(status: int) -> aiohttp.ClientResponseError:
    return aiohttp.ClientResponseError(None, (), status=status)  # type: ignore[arg-type]


def by_urllib(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://engine", status, "", Message(), None)


@pytest.mark.parametrize("status", WORLD)
def test_what_the_model_client_was_answered_for_whatever_it_asked_is_the_worlds(status: int) -> None:
    assert of_the_world(answered(status))


@pytest.mark.parametrize("status", AGENT)
def test_what_it_was_answered_for_what_it_sent_is_the_agents(status: int) -> None:
    assert not of_the_world(answered(status))


@pytest.mark.parametrize("client", [by_httpx, by_aiohttp, by_urllib], ids=lambda made: made.__name__)
def test_other_clients_may_have_asked_others(client: Callable[[int], Exception]) -> None:
    """A 404 of a tool may answer an address that the policy made up. A 500 or 429 answers nothing that was asked."""
    found = {status: of_the_world(client(status)) for status in (*WORLD, *AGENT)}
    assert {status for status, world in found.items() if world} == {500, 502, 503, 504, 529, 429}


class APIError(Exception):
    """Named as docker's: its base is no client of a model."""

    def __init__(self, status_code: int) -> None:
        super().__init__()
        self.status_code = status_code


class NoSuchContainer(APIError): ...


def cut_answer() -> aiohttp.ClientPayloadError:
    """The error of an answer that ends before its length is reached."""
    error = aiohttp.ClientPayloadError("Response payload is not completed")
    error.__cause__ = aiohttp.http_exceptions.ContentLengthError("Not enough data")
    return error


UNREACHED = (
    ConnectionRefusedError(), ConnectionResetError(), ConnectionAbortedError(), http.client.RemoteDisconnected(""),
    http.client.IncompleteRead(b""), socket.gaierror(), urllib.error.URLError(ConnectionRefusedError()),
    urllib.error.URLError(TimeoutError("while connecting")), urllib.error.URLError(socket.gaierror()),
    httpx.ConnectError(""), httpx.ReadError(""), httpx.RemoteProtocolError(""), httpx.ConnectTimeout(""),
    httpx.ProxyError(""), aiohttp.ServerDisconnectedError(), aiohttp.ClientPayloadError(), aiohttp.ClientOSError(),
    aiohttp.ConnectionTimeoutError(), OSError(errno.EHOSTUNREACH, ""), TimeoutError(errno.ETIMEDOUT, ""),
    openai.APIConnectionError(request=REQUEST), openai.APIError("in a stream", REQUEST, body=None),
    asyncio.IncompleteReadError(b"", 1), errors.ProxyUnreachable(""), errors.NotReady(""), errors.EngineError(""),
    errors.OverQuota(""), WorldFailed(""), cut_answer(),
)  # fmt: skip
OTHERS = (
    ValueError(""), KeyError(""), AssertionError(), RuntimeError("503"), FileNotFoundError(), PermissionError(),
    TimeoutError(), httpx.ReadTimeout(""), httpx.WriteTimeout(""), httpx.PoolTimeout(""), aiohttp.SocketTimeoutError(),
    openai.APITimeoutError(request=REQUEST), httpx.UnsupportedProtocol(""), httpx.LocalProtocolError(""),
    httpx.InvalidURL(""), openai.OpenAIError(""), SystemExit(503), KeyboardInterrupt(), asyncio.CancelledError(),
    errors.BadRequest(""), errors.Conflict(""), errors.NotFound(""), errors.TooLarge(""),
    subprocess.CalledProcessError(500, "pytest"), BrokenPipeError(32, "Broken pipe"),
    urllib.error.URLError("unknown url type: foo"), urllib.error.URLError(FileNotFoundError()), NoSuchContainer(404),
    NoSuchContainer(409),
)  # fmt: skip


@pytest.mark.parametrize("error", UNREACHED, ids=repr)
def test_nobody_was_reached(error: BaseException) -> None:
    assert of_the_world(error)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_anything_else_is_the_agents(error: BaseException) -> None:
    """Also a client that gave up waiting for an answer: the policy may have rambled."""
    assert not of_the_world(error)


def raised(raising: Callable[[], Any]) -> BaseException:
    try:
        raising()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def wrap(error: BaseException, *, how: str) -> BaseException:
    def raising() -> None:
        try:
            raise error
        except BaseException as caught:
            if how == "from":
                raise RuntimeError("the agent gave up") from caught
            if how == "from None":
                raise RuntimeError("the agent gave up") from None
            raise RuntimeError("the agent gave up")  # noqa: B904

    return raised(raising)


def test_a_wrapped_exception_is_known_by_its_cause() -> None:
    assert of_the_world(wrap(answered(503), how="from"))
    assert of_the_world(wrap(wrap(httpx.ConnectError(""), how="from"), how="from"))
    assert not of_the_world(wrap(answered(400), how="from"))


@pytest.mark.parametrize("how", ["while handling", "from None"])
def test_what_an_exception_was_raised_after_is_no_cause(how: str) -> None:
    """The agent may have mended that, and failed by itself: at what the model answered then, say."""
    assert not of_the_world(wrap(answered(503), how=how))


@pytest.mark.skipif(not hasattr(builtins, "ExceptionGroup"), reason="exception groups came with Python 3.11")
def test_a_group_is_known_by_what_is_in_it() -> None:
    group: Any = builtins.ExceptionGroup  # type: ignore[attr-defined]
    assert of_the_world(group("", [ValueError(), group("", [wrap(answered(500), how="from")])]))
    assert not of_the_world(group("", [ValueError(), answered(422)]))
    assert of_the_world(wrap(group("", [answered(429)]), how="from"))


def test_the_outer_one_decides_if_it_says_anything() -> None:
    def raising(error: BaseException, cause: BaseException) -> BaseException:
        error.__cause__ = cause
        return error

    assert not of_the_world(raising(answered(400), ConnectionResetError()))
    assert of_the_world(raising(openai.APITimeoutError(request=REQUEST), httpx.ConnectTimeout("")))
    assert not of_the_world(raising(openai.APITimeoutError(request=REQUEST), httpx.ReadTimeout("")))
    assert not of_the_world(raising(openai.APIConnectionError(request=REQUEST), httpx.UnsupportedProtocol("")))
    for status in (404, 401):  # of a framework that keeps the status, and not the class
        assert of_the_world(raising(by_httpx(status), answered(status)))
    circle = ValueError()
    circle.__cause__ = RuntimeError()
    circle.__cause__.__cause__ = circle
    assert not of_the_world(circle)


def test_an_attempt_that_was_given_up_hides_no_later_failure() -> None:
    def raising() -> None:
        try:
            raise TimeoutError
        except TimeoutError:
            raise ConnectionRefusedError  # noqa: B904

    assert of_the_world(raised(raising))


class Broken(Exception):
    """Nothing can be read of it but its class."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Broken
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_of_which_nothing_can_be_read_is_the_agents_by_its_class() -> None:
    assert not of_the_world(Broken())
    assert reason_of(Broken()) == "Broken"
    assert of_the_world(wrap(Broken(), how="from"), (Broken,))
    for name in ("args", "errno", "reason", "response", "status_code", "exceptions", "body"):
        half = type("APIError", (ValueError,), {name: property(lambda self: 1 // 0)})
        assert not of_the_world(half("half")) and reason_of(half("half")) == "APIError: half"


def test_classes_that_the_caller_names() -> None:
    class SandboxGone(Exception):
        pass

    assert not of_the_world(SandboxGone())
    assert of_the_world(SandboxGone(), (SandboxGone,))
    assert of_the_world(wrap(SandboxGone(), how="from"), (SandboxGone,))


OF_OTHER_CLIENTS = """
import anthropic, httpx, requests, urllib3
from ajet_sdk.rewards.blame import of_the_world

def answered(status):
    request = httpx.Request("POST", "http://engine/v1/messages")
    client = anthropic.Anthropic(api_key="k", base_url="http://engine")
    return client._make_status_error_from_response(httpx.Response(status, request=request, json={}))

def raised(ask):
    try:
        ask()
    except Exception as error:
        return error

def by_requests(status):
    response = requests.Response()
    response.status_code = status
    return raised(response.raise_for_status)

nobody = "http://127.0.0.1:9/v1/messages"
late = urllib3.exceptions.ReadTimeoutError(None, nobody, "")
def retried(status):  # as a session that tried again and again, and was answered so each time
    words = urllib3.exceptions.ResponseError.SPECIFIC_ERROR.format(status_code=status)
    reason = urllib3.exceptions.ResponseError(words)
    return requests.exceptions.RetryError(urllib3.exceptions.MaxRetryError(None, "/", reason))

said = {
    "anthropic": [status for status in (500, 529, 429, 401, 403, 404, 408, 409, 400, 413, 422)
                  if of_the_world(answered(status))],
    "requests": [status for status in (500, 503, 429, 404, 400) if of_the_world(by_requests(status))],
    "unreached": [of_the_world(error) for error in (
        raised(lambda: anthropic.Anthropic(api_key="k", base_url="http://127.0.0.1:9", max_retries=0).messages.create(
            model="m", max_tokens=1, messages=[{"role": "user", "content": "?"}])),
        raised(lambda: requests.post(nobody)), raised(lambda: urllib3.PoolManager(retries=0).request("POST", nobody)),
        requests.exceptions.ChunkedEncodingError(), requests.exceptions.ConnectTimeout(),
    )],
    "retried": [status for status in (503, 429, 404, 400) if of_the_world(retried(status))],
    "waited": [of_the_world(error) for error in (
        anthropic.APITimeoutError(request=httpx.Request("POST", nobody)), requests.exceptions.ReadTimeout(), late,
        requests.exceptions.ConnectionError(late),
    )],
}
print(said)
"""


@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="anthropic and requests are in .venv-engine: .ci/setup")
def test_other_clients() -> None:
    done = subprocess.run([ENGINE_PYTHON, "-c", OF_OTHER_CLIENTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == {
        "anthropic": [500, 529, 429, 401, 403, 404, 408, 409], "requests": [500, 503, 429],
        "unreached": [True] * 5, "waited": [False] * 4, "retried": [503, 429],
    }  # fmt: skip
