"""Requests of a trainer to a vLLM, and how it makes sure that they were heard.

Each request has a connection of its own. A server may close one after an error without a word (uvicorn does after a
500). What is sent over it next is lost, and that would be what cleans up after the error.

An engine that was frozen is told to go on until it says that it does (`wake`). One that does not is named, with what to
do, since its calls would wait for ever.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import httpx

from ajet_sdk.sockets import watching
from ajet_trainer.attempts import Elsewhere

WAKE_S = 30.0
"""For how long an engine is told to go on, and is asked to forget what old weights computed."""
ANSWER_S = 10.0
"""The time for an answer that needs no work."""
TOLD_S = 60.0
"""The time to tell its settings: vLLM then also lists the packages of its host, which a busy one does slowly."""
AGAIN = (408, 425, 429)
DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"
START_AGAIN = "start it again"


class EngineLost(Elsewhere):
    """An engine died, did not take the weights or serves others; the message says which one and what is known."""


def asking(url: str, timeout_s: float, key: str = "") -> httpx.Client:
    """A client of the engine at `url`, which has `timeout_s` seconds for an answer; `key` is the engine's own."""
    way = httpx.HTTPTransport(
        verify=_trusted(), socket_options=watching(), limits=httpx.Limits(max_keepalive_connections=0)
    )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = httpx.Timeout(30.0, read=timeout_s)
    return httpx.Client(base_url=url, headers=headers, timeout=limit, trust_env=False, transport=way)


@cache
def _trusted() -> ssl.SSLContext:
    """Read once: reading the certificates takes as long as several requests, and agents wait for it."""
    return httpx.create_ssl_context(trust_env=False)


def each(urls: Sequence[str], tell: Callable[[str], None]) -> None:
    """Has `tell` done with every engine at once. Raises `EngineLost`, with what is wrong with each that failed."""
    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        failures = [failure for told in [pool.submit(tell, url) for url in urls] if (failure := told.exception())]
    lost = [failure for failure in failures if isinstance(failure, EngineLost)]
    for failure in failures:
        if failure not in lost:
            raise failure
    if lost:
        raise EngineLost("; ".join(map(str, lost))) from lost[0]


def ask(engine: httpx.Client, path: str, body: Any = None, timeout_s: float | None = None) -> httpx.Response:
    """A good answer to ``POST path``, after `timeout_s` at most instead of the client's own limit."""
    limit = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
    return engine.post(path, json=body, timeout=limit).raise_for_status()


def cards(engine: httpx.Client) -> list[dict[str, Any]]:
    """The models that the engine serves, as it tells them. Raises `httpx.HTTPError`, also for what is no list of them,
    as a proxy may say before an engine that is starting."""
    answer = engine.get("/v1/models").raise_for_status()
    with suppress(ValueError, LookupError, TypeError):
        found: list[dict[str, Any]] = answer.json()["data"]
        if all(isinstance(card, dict) and "id" in card for card in found):
            return found
    raise httpx.RemoteProtocolError("/v1/models tells no models")


def version_of(engine: httpx.Client) -> str | None:
    """The version of the engine's weights, if it tells one."""
    with suppress(httpx.HTTPError, ValueError, AttributeError):
        found: str | None = engine.get("/weight_info").raise_for_status().json().get("weight_version")
        return found
    return None


def told(engine: httpx.Client) -> Mapping[str, Any]:
    """The engine's settings of its model, with `dtype` and `quantization`, if it tells them; else nothing."""
    with suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
        answer = engine.get("/server_info?config_format=json", timeout=TOLD_S).raise_for_status()
        found = answer.json()["vllm_config"]["model_config"]
        return found if isinstance(found, dict) else {}
    return {}


def frozen(engine: httpx.Client) -> bool:
    """True if the engine is frozen, as the proxy's gate may have done. To freeze it again would take vLLM 20 ms."""
    with suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
        return engine.get("/is_paused").json()["is_paused"] is True
    return False


def wake(engine: httpx.Client, patience_s: float = WAKE_S) -> str:
    """Has the engine go on. Returns what is wrong if it does not within `patience_s`. An engine that has no such route
    was never frozen, and one that does not tell whether it is frozen is taken by its word."""

    def awake() -> str:
        ask(engine, "/resume", timeout_s=ANSWER_S)
        told = engine.get("/is_paused", timeout=ANSWER_S)
        if told.status_code == 404:
            return ""
        return "it stays frozen" if told.raise_for_status().json()["is_paused"] else ""

    return again(awake, patience_s)


def forgets(engine: httpx.Client, patience_s: float) -> bool:
    """Has the engine forget what its old weights have computed. False if it did not within `patience_s`, because calls
    use it. Raises `httpx.HTTPError` for a refusal."""

    def forgotten() -> str:
        told = ask(engine, "/reset_prefix_cache")
        with suppress(ValueError, AttributeError):
            return "" if told.json().get("success", True) else "calls use it"
        return ""

    return not again(forgotten, patience_s, final=True)


def again(attempt: Callable[[], str], patience_s: float, *, final: bool = False) -> str:
    """Makes an `attempt` until it returns nothing, and returns what was wrong with the last one. A refusal is not
    repeated; if `final`, no error is, and it is raised."""
    give_up, pause = time.monotonic() + patience_s, 0.1
    while True:
        try:
            fault = attempt()
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            if final:
                raise
            fault, status = words(error), 500
            if isinstance(error, httpx.HTTPStatusError):
                status = error.response.status_code
            if status < 500 and status not in AGAIN:
                return "" if status == 404 else fault
        if not fault or time.monotonic() + pause > give_up:
            return fault
        time.sleep(pause)
        pause = min(2 * pause, 2.0)


def words(error: Exception, how: str = DEV_MODE) -> str:
    """Says what went wrong; `how` an engine has the route, if it is missing."""
    if not isinstance(error, httpx.HTTPStatusError):
        return str(error) or type(error).__name__
    path, text = error.request.url.path, error.response.text
    if error.response.status_code == 401:
        return f"HTTP 401 from {path}: it wants its API key: set AJET_UPSTREAM_KEY for the trainer, as for the daemon"
    if error.response.status_code == 404 and '"error"' not in text:
        return f"{path} is missing; {how}"
    return f"HTTP {error.response.status_code} from {path}: {text[:300]}"
