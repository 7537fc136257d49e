"""vLLM as a trainer asks it: over connections that the other side closes, until it was heard, in words that help."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from ajet_trainer.engines import EngineLost, each, vllm
from ajet_trainer.engines.vllm import Vllm
from tests.trainer.stub_engine import StubEngine


def test_what_follows_an_error_is_heard_although_the_server_has_closed_the_connection(
    engine: StubEngine, tmp_path: Path
) -> None:
    engine.status["/collective_rpc"] = 500
    for _ in range(20):
        engine.frozen = True
        with Vllm(engine.url, 300.0) as asked:
            with pytest.raises(httpx.HTTPStatusError):
                asked.reload(tmp_path, 300.0)
            assert asked.wake(300.0) == ""
        assert not engine.frozen


def test_an_engine_is_told_to_go_on_until_it_says_that_it_does(engine: StubEngine) -> None:
    engine.deaf, engine.frozen = 3, True
    with Vllm(engine.url, 300.0) as asked:
        assert asked.wake(300.0) == ""
    assert engine.asked == ["/resume"] * 4 + ["/is_paused"] and not engine.frozen


def test_an_engine_that_does_not_go_on_is_said_to_be_frozen(engine: StubEngine) -> None:
    engine.deaf, engine.frozen = 1000, True
    with Vllm(engine.url, 300.0) as asked:
        assert asked.wake(0.5) == 'HTTP 500 from /resume: {"error": "not now"}'
        engine.answer = lambda path, body: (200, {"is_paused": True})  # type: ignore[method-assign]
        assert asked.wake(0.5) == "it stays frozen"


def test_an_engine_that_does_not_tell_is_taken_by_its_word(engine: StubEngine) -> None:
    engine.lacks, engine.frozen = {"/is_paused"}, True
    with Vllm(engine.url, 300.0) as asked:
        assert asked.wake(300.0) == "" and not engine.frozen


def test_a_refusal_is_not_repeated(engine: StubEngine) -> None:
    engine.key = "sesame"
    start = time.monotonic()
    with Vllm(engine.url, 300.0) as asked:
        said = "HTTP 401 from /resume: it wants its API key: set AJET_UPSTREAM_KEY for the trainer, as for the daemon"
        assert asked.wake(600.0) == said
    assert engine.asked == ["/resume"] and time.monotonic() - start < 300


def test_the_engines_own_key_opens_it(engine: StubEngine) -> None:
    engine.key = "sesame"
    with Vllm(engine.url, 300.0, "sesame") as asked:
        assert asked.wake(300.0) == ""


def test_settings_are_waited_for_longer_than_what_needs_no_work() -> None:
    waits = list[float]()

    def answer(request: httpx.Request) -> httpx.Response:
        waits.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json={"vllm_config": {"model_config": {"dtype": "float32"}}})

    with Vllm("http://e", 1.0) as asked:
        asked._http = httpx.Client(base_url="http://e", transport=httpx.MockTransport(answer), timeout=1)
        assert asked.dtype() == "float32" and waits == [60.0]


@pytest.mark.parametrize("under", ["", "/behind/a/path"])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/models", "is there a vLLM?"),
        ("/v1/completions", "is there a vLLM?"),
        ("/v1/load_lora_adapter", vllm.ADAPTERS),
        ("/v1/unload_lora_adapter", vllm.ADAPTERS),
        ("/collective_rpc", vllm.DEV_MODE),
    ],
)
def test_a_route_that_is_missing_is_said_with_how_vllm_has_it(path: str, said: str, under: str) -> None:
    request = httpx.Request("POST", f"http://e{under}{path}")
    error = httpx.HTTPStatusError("", request=request, response=httpx.Response(404, request=request))
    assert vllm.words(error) == f"{under}{path} is missing; {said}"


def test_an_engine_forgets_once_nothing_uses_what_it_has_computed(engine: StubEngine) -> None:
    engine.busy = 2
    with Vllm(engine.url, 300.0) as asked:
        assert asked.forgets(0.0) is False
        assert asked.forgets(300.0) is True
        engine.busy = 1000
        assert asked.forgets(0.3) is False


def test_all_that_failed_is_said(engine: StubEngine) -> None:
    def fail(url: str) -> None:
        if url != "c":
            raise EngineLost(f"{url} is gone")

    with pytest.raises(EngineLost, match=r"^a is gone; b is gone$"):
        each(["a", "b", "c"], fail)
