"""vLLM, as a trainer asks it: its routes, their bodies and what they answer. Nothing else of the trainer names one.

Each request has a connection of its own. A server may close one after an error without a word (uvicorn does after a
500). What is sent over it next is lost, and that would be what cleans up after the error.

An engine that was frozen is told to go on until it says that it does (`Vllm.wake`). One that does not is named, with
what to do, since its calls would wait for ever.
"""

from __future__ import annotations

import ssl
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from ajet_sdk.sockets import watching

WAKE_S = 30.0
"""For how long an engine is told to go on, and is asked to forget what old weights computed."""
ANSWER_S = 10.0
"""The time for an answer that needs no work."""
TOLD_S = 60.0
"""The time to tell its settings: vLLM then also lists the packages of its host, which a busy one does slowly."""
DEAD_S = 2.0
AGAIN = (408, 425, 429)
NO_VERSION = "default"
"""The version of its weights that vLLM tells until it is told another."""
DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"
ADAPTERS = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
_MODELS, _COMPLETIONS, _PAUSED = "/v1/models", "/v1/completions", "/is_paused"
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_IS_VLLM = "is there a vLLM?"
_HOW = {_MODELS: _IS_VLLM, _COMPLETIONS: _IS_VLLM, _LOAD: ADAPTERS, _UNLOAD: ADAPTERS}
"""The way to have a route; of all others `DEV_MODE`."""
_NEUTRAL = {
    "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0,
}  # fmt: skip
"""So that no default of the engine counts."""


class Answer(NamedTuple):
    """A greedy answer of an engine: token ids and its logprob of each [T]. Those of the `likeliest` tokens at a place
    [T, 5], and of the answer computed `again` as a prompt [T], are empty if it does not tell them."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    likeliest: tuple[tuple[float, ...], ...] = ()
    again: tuple[float, ...] = ()


class Vllm:
    """The vLLM at `url`, which has `timeout_s` seconds for an answer; `key` is its own. Its methods raise
    `httpx.HTTPError`, unless they say otherwise."""

    def __init__(self, url: str, timeout_s: float, key: str = "") -> None:
        way = httpx.HTTPTransport(
            verify=_trusted(), socket_options=watching(), limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=False, transport=way,
            timeout=httpx.Timeout(30.0, read=timeout_s),
        )  # fmt: skip

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def dead(self) -> str:
        """Says how it has died; nothing while all may be well. A slow answer is no sign of death: an engine that loads
        weights may be too busy to answer. Raises nothing."""
        try:
            status = self._http.get("/health", timeout=DEAD_S).status_code
        except httpx.TimeoutException:
            return ""
        except httpx.TransportError as error:
            return f"is gone ({error or type(error).__name__})"
        return f"reports that it is dead (HTTP {status})" if status >= 500 else ""

    def own_models(self) -> tuple[tuple[str, str, int | None], ...]:
        """Name, folder and longest context of each model of its own, which adapters are not."""
        own = (card for card in self._cards() if not card.get("parent"))
        return tuple(sorted((str(card["id"]), str(card.get("root")), card.get("max_model_len")) for card in own))

    def folder_of(self, name: str) -> str | None:
        """The folder of what answers to `name`, if anything does."""
        return next((str(card.get("root")) for card in self._cards() if card["id"] == name), None)

    def dtype(self) -> str | None:
        """The dtype in which it holds and computes the model, as ``bfloat16``; None if it tells none, or quantizes.
        Raises nothing."""
        with suppress(httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
            answer = self._http.get("/server_info?config_format=json", timeout=TOLD_S).raise_for_status()
            found = answer.json()["vllm_config"]["model_config"]
            return None if found.get("quantization") else str(found["dtype"].removeprefix("torch."))
        return None

    def version(self) -> str | None:
        """The version of its weights, if it tells one. Raises nothing."""
        with suppress(httpx.HTTPError, ValueError, AttributeError):
            found: str | None = self._http.get("/weight_info").raise_for_status().json().get("weight_version")
            return found
        return None

    def takes_weights(self) -> bool:
        """False if it was started without the routes that take whole weights."""
        return self._http.get(_PAUSED).status_code != 404

    def takes_adapters(self) -> bool:
        """False if it was started without the routes that take adapters."""
        return self._http.post(_LOAD, json={}).status_code not in (404, 405)

    def frozen(self) -> bool:
        """True if it is frozen, as the proxy's gate may have done. To freeze it again would take vLLM 20 ms. Raises
        nothing."""
        with suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
            return self._http.get(_PAUSED).json()["is_paused"] is True
        return False

    def freeze(self) -> None:
        """Freezes it between two tokens of what it generates."""
        self._ask("/pause?mode=keep")

    def wake(self, patience_s: float) -> str:
        """Has it go on. Returns what is wrong if it does not within `patience_s`. One that has no such route was never
        frozen, and one that does not tell whether it is frozen is taken by its word. Raises nothing."""

        def awake() -> str:
            self._ask("/resume", timeout_s=ANSWER_S)
            told = self._http.get(_PAUSED, timeout=ANSWER_S)
            return "it stays frozen" if told.raise_for_status().json()["is_paused"] else ""

        return again(awake, patience_s)

    def reload(self, folder: Path, timeout_s: float) -> None:
        """Has it reload its weights from `folder`, in place."""
        how = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": timeout_s}
        self._ask("/collective_rpc", how)

    def forgets(self, patience_s: float) -> bool:
        """Has it forget what its old weights have computed. False if it did not within `patience_s`, because calls use
        it."""

        def forgotten() -> str:
            told = self._ask("/reset_prefix_cache")
            with suppress(ValueError, AttributeError):
                return "" if told.json().get("success", True) else "calls use it"
            return ""

        return not again(forgotten, patience_s, final=True)

    def name_version(self, version: int) -> None:
        """Tells it the version of its weights."""
        self._ask("/update_weight_version", {"new_version": str(version)})

    def load_adapter(self, name: str, folder: str) -> None:
        """Has it answer to `name` with the adapter in `folder`; nothing else may answer to it."""
        self._ask(_LOAD, {"lora_name": name, "lora_path": folder})

    def unload_adapter(self, name: str) -> None:
        self._ask(_UNLOAD, {"lora_name": name})

    def answer(self, model: str, prompt: Sequence[int], tokens: int) -> Answer:
        """Has it go on greedily from the token ids `prompt`, for so many `tokens`. Nothing that it has computed before
        is used for it. Raises `ValueError` if it does not tell tokens and logprobs."""
        salt = uuid.uuid4().hex
        body = {"model": model, "return_token_ids": True, "cache_salt": salt, **_NEUTRAL}
        asked = {"prompt": list(prompt), "max_tokens": tokens, "ignore_eos": True, "logprobs": 5}
        try:
            choice = self._ask(_COMPLETIONS, body | asked).json()["choices"][0]
            told = choice["logprobs"]
            made = Answer(
                tuple(choice["token_ids"]), tuple(map(float, told["token_logprobs"])),
                tuple(tuple(map(float, place.values())) for place in told.get("top_logprobs") or ()),
            )
        except (LookupError, TypeError, ValueError, AttributeError):
            raise ValueError(f"{_COMPLETIONS} does not tell token ids and logprobs") from None
        if not made.ids or len(made.ids) != len(made.logprobs):
            raise ValueError(f"{_COMPLETIONS} tells {len(made.logprobs)} logprobs of {len(made.ids)} tokens")
        whole = {"prompt": [*prompt, *made.ids], "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": f"{salt}-again"}
        with suppress(httpx.HTTPStatusError, LookupError, TypeError, ValueError):
            found = self._ask(_COMPLETIONS, body | whole).json()["choices"][0]["prompt_logprobs"][len(prompt) :]
            made = made._replace(again=tuple(
                float(place[str(token)]["logprob"]) for place, token in zip(found, made.ids, strict=True)
            ))  # fmt: skip
        return made

    def _cards(self) -> list[dict[str, Any]]:
        """The models that it serves, as it tells them. An error is also what is no list of them, as a proxy may say
        before an engine that is starting."""
        answer = self._http.get(_MODELS).raise_for_status()
        with suppress(ValueError, LookupError, TypeError):
            found: list[dict[str, Any]] = answer.json()["data"]
            if all(isinstance(card, dict) and "id" in card for card in found):
                return found
        raise httpx.RemoteProtocolError(f"{_MODELS} tells no models")

    def _ask(self, path: str, body: Any = None, timeout_s: float | None = None) -> httpx.Response:
        """A good answer to ``POST path``, after `timeout_s` at most instead of the client's own limit."""
        limit = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        return self._http.post(path, json=body, timeout=limit).raise_for_status()


@cache
def _trusted() -> ssl.SSLContext:
    """Read once: reading the certificates takes as long as several requests, and agents wait for it."""
    return httpx.create_ssl_context(trust_env=False)


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


def words(error: Exception) -> str:
    """Says what went wrong, and how vLLM has a route that is missing."""
    if not isinstance(error, httpx.HTTPStatusError):
        return str(error) or type(error).__name__
    path, text = error.request.url.path, error.response.text
    if error.response.status_code == 401:
        return f"HTTP 401 from {path}: it wants its API key: set AJET_UPSTREAM_KEY for the trainer, as for the daemon"
    if error.response.status_code == 404 and '"error"' not in text:
        how = next((how for route, how in _HOW.items() if path.endswith(route)), DEV_MODE)
        return f"{path} is missing; {how}"
    return f"HTTP {error.response.status_code} from {path}: {text[:300]}"
