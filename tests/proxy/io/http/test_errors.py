"""The edge: every failure as the JSON that OpenAI's clients expect, or Anthropic's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from ajet_proxy.io.http.errors import error_middleware, http_logger, refuse_foreign_pages
from ajet_sdk.errors import AjetError, Conflict, NotReady, Unauthorized
from tests.kit.answering import running


async def answer(request: web.Request) -> web.StreamResponse:
    match request.match_info["what"]:
        case "conflict":
            raise Conflict("no", code="c", param="p")
        case "wait":
            raise NotReady("later", retry_after=1.2)
        case "who":
            raise Unauthorized("no key")
        case "bug":
            raise ZeroDivisionError("a detail that is nobody's business")
        case "redirect":
            raise web.HTTPFound("/ok")
        case "gone":  # the client leaves before the end of an answer, which is written before the loop hears of it
            response = web.StreamResponse()
            await response.prepare(request)
            assert request.transport is not None
            request.transport.close()
            await response.write_eof()
        case "begun":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"half")
            raise Conflict("too late to be said")
        case "broken":
            raise ConnectionResetError("not the client's connection")
        case "body":
            return web.json_response(len(await request.read()))
    return web.json_response("fine")


async def answer_messages(request: web.Request) -> web.StreamResponse:
    raise NotReady("later", retry_after=1.2)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = web.Application(middlewares=[error_middleware, refuse_foreign_pages(("our.example",))])
    app.router.add_get("/{what}", answer)
    app.router.add_post("/{what}", answer)
    app.router.add_post("/{what}/only", answer)
    app.router.add_get("/e/x/v1/messages", answer_messages)
    async with running(app, logger=http_logger) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "status", "error", "header"),
    [
        ("/conflict", 409, {"message": "no", "type": "conflict_error", "code": "c", "param": "p"}, None),
        ("/wait", 503, {"message": "later", "type": "not_ready_error"}, ("Retry-After", "2")),
        ("/who", 401, {"type": "authentication_error"}, ("WWW-Authenticate", "Bearer")),
        ("/nothing/here", 404, {"code": "unknown_route"}, None),
        ("/x/only", 405, {"code": "method_not_allowed"}, ("Allow", "POST")),
        ("/bug", 500, {"type": AjetError.type, "code": "internal_error"}, None),
    ],
)
async def test_each_failure_has_its_status_and_shape(
    url: str, path: str, status: int, error: dict[str, str], header: tuple[str, str] | None
) -> None:
    async with aiohttp.ClientSession() as session, session.get(url + path) as reply:
        assert reply.status == status
        body = await reply.json()
        assert set(body["error"]) == {"message", "type", "code", "param"}
        assert body["error"].items() >= error.items()
        assert "detail" not in body["error"]["message"]
        assert header is None or reply.headers[header[0]] == header[1]


async def test_anthropics_clients_are_told_in_their_own_words(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        reply = await session.get(url + "/e/x/v1/messages")
        assert (reply.status, reply.headers["Retry-After"]) == (503, "2")
        assert await reply.json() == {"type": "error", "error": {"type": "overloaded_error", "message": "later"}}


async def test_a_body_that_cannot_be_unpacked_is_400(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with aiohttp.ClientSession() as session:
        headers = {"Content-Encoding": "gzip"}
        reply = await session.post(url + "/body", data=b"no gzip", headers=headers)
        assert (reply.status, (await reply.json())["error"]["code"]) == (400, "bad_body")
    assert not [record for record in caplog.records if record.levelname != "INFO" or record.exc_info]


async def test_what_is_no_failure_stays_as_it_is(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(url + "/redirect") as reply:
        assert (reply.status, await reply.json()) == (200, "fine")


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200), ("http://localhost:3000", 200), ("http://127.0.0.1:8484", 200), ("http://[::1]", 200),
        ("https://evil.example", 403), ("http://localhost.evil.example", 403), ("null", 403), ("http://[", 403),
    ],
)
async def test_pages_of_other_sites_cannot_use_the_visitors_browser(url: str, origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"Origin": origin}
    async with aiohttp.ClientSession() as session, session.get(url + "/ok", headers=headers) as reply:
        assert reply.status == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200), ("a.localhost", 200), ("LOCALHOST", 200), ("127.0.0.1:8484", 200), ("[::1]:8484", 200),
        ("10.1.2.3", 200), ("Our.example:80", 200), ("evil.example:8484", 403), ("evillocalhost", 403), (":", 403),
        (f"{'a.' * 150}localhost", 403),
    ],
)
async def test_a_foreign_name_that_was_made_to_mean_this_machine_is_refused(url: str, host: str, status: int) -> None:
    async with aiohttp.ClientSession() as session, session.get(url + "/ok", headers={"Host": host}) as reply:
        assert reply.status == status
        if status == 403:
            message = (await reply.json())["error"]["message"]
            assert f"AJET_PUBLIC_URL=http://{host[:100]}" in message and "AJET_ADMIN_SECRET" in message


async def test_an_answer_that_has_begun_breaks_off(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/begun") as reply:
        assert (reply.status, await reply.content.readany()) == (200, b"half")
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.content.readany()
        assert reply.content.total_bytes == len(b"half")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_goes_away_is_no_error_in_the_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            async with session.get(f"{url}/gone") as reply:
                await reply.read()
        async with session.get(f"{url}/fine") as reply:
            assert reply.status == 200
    assert not caplog.records


async def test_any_other_broken_connection_is_one(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/broken") as reply:
        assert reply.status == 500
    assert [record.name for record in caplog.records] == [http_logger.name]
