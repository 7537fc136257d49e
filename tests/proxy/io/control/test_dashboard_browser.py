"""The owner's page in a real browser: what it shows, whom it asks, and that nothing an agent writes comes to life."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger.events import EpisodeOpened
from ajet_proxy.core.ledger.state import LedgerSettings
from ajet_proxy.io.storage.store import Store
from ajet_sdk.page import still_page
from tests.kit.browser import MISSING, Page, browsing, find
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import CHAT, Client, serving

pytestmark = pytest.mark.skipif(find() is None, reason=MISSING)
SECRET = "a secret of sixteen and more"
EVIL = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
ROWS = "document.querySelectorAll('#episodes tbody tr').length"


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with browsing(tmp_path / "profile") as page:
        yield page


async def play(
    client: Client, task: str, said: str, *, agent: str = "solver", reward: float | None = 1.0, key: str | None = None
) -> str:
    """An episode of three calls, of which the last begins a new timeline."""
    opened = await client.open({"task": task, "agent": agent}, key=key)
    messages = [{"role": "user", "content": said}]
    for turn in range(3):
        answer = await client.ask("POST", f"/e/{opened}/v1/chat/completions", CHAT | {"messages": messages}, key=key)
        assert answer.status == 200
        message = answer.json["choices"][0]["message"]
        again = [*messages, message, {"role": "user", "content": "and?"}]
        messages = again if turn == 0 else [{"role": "user", "content": "Other."}]
    if reward is not None:
        await client.control("POST", f"/episodes/{opened}/rewards", {"value": reward}, key=key)
    return str(opened)


async def nothing_foreign(page: Page, origin: str) -> None:
    assert page.requests
    assert all(url.startswith((origin, "data:")) for url in page.requests), page.requests
    assert await page.run("window.hit") is None
    assert await page.run("document.querySelectorAll('main img, main script').length") == 0


async def test_the_board_and_an_episode(page: Page, tmp_path: Path) -> None:
    async with EngineStub() as stub, serving(tmp_path / "data", upstream=(f"stub={stub.url}",)) as client:
        await client.control("POST", "/policy", {"model": "stub", "version": 7})
        episode = await play(client, EVIL, EVIL, agent=EVIL)
        await play(client, "t", "x", reward=None)
        await page.open(f"{client.app.url}/ajet/")
        await page.until(f"{ROWS} === 2 && document.querySelector('svg .dot.train')")
        text = await page.text()
        for shown in ("v7", EVIL, "Broken chains", "gate", "the agent", "ready 1", "open 1"):
            assert shown in text, shown
        assert "any model" not in text and "Judgements" not in text
        await page.run(f"location.hash = '#/e/{episode}'")
        await page.until("document.querySelector('.tokens')")
        await check_tokens(page, client, episode)
        assert not page.complaints
        await nothing_foreign(page, client.app.url)


async def check_tokens(page: Page, client: Client, episode: str) -> None:
    record = (await client.control("GET", f"/episodes/{episode}?tokens=timelines")).json
    first, *others = record["timelines"]
    assert others
    colours = "[...document.querySelectorAll('.tokens .c, .tokens .s')].map(one => one.classList.contains('s') ? 1 : 0)"
    assert await page.run(colours) == first["loss_mask"]
    spoken = "[...document.querySelectorAll('.tokens .c, .tokens .s')].map(one => one.textContent).join('')"
    assert EVIL in await page.run(spoken)
    at = first["loss_mask"].index(1)
    about = await page.run("document.querySelector('.tokens .s').dataset.t")
    assert f"id {first['token_ids'][at]} · mask 1 · logprob {first['logprobs'][at]:.3f}" in about
    assert about.endswith("policy version 7")
    chip = await page.run("document.querySelector('.tokens .chip').dataset.t")
    assert chip == f"{first['calls'][0]} · raw logprobs · ended by {first['finish_reasons'][0]}"
    assert "raw logprobs" in await page.text()
    point = "document.querySelector('.tokens .s').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    await page.run(point)
    assert await page.run("document.getElementById('tip').textContent") == about
    for index, other in enumerate(others, 1):
        assert other["broken_by"] in await page.run(f"document.querySelectorAll('.why')[{index}].textContent")
    await page.run("document.querySelectorAll('.tree button')[1].click()")
    assert f"{others[0]['broken_by']}: " in await page.text()
    assert await page.run(colours) == others[0]["loss_mask"]


async def test_what_is_to_be_judged_has_a_card(page: Page, tmp_path: Path) -> None:
    served = {"traffic": "chat", "traffic_holdout": 1.0}
    async with EngineStub() as stub, serving(tmp_path / "data", upstream=(stub.url,), **served) as client:
        for name in ("one", "two"):
            await client.chat(name)
            await client.control("POST", f"/episodes/{name}/seal")
        await client.control("POST", "/episodes/one/judgement", {"judge": "j", "rewards": [{"value": 0.25}]})
        await page.open(f"{client.app.url}/ajet/")
        await page.until(f"{ROWS} === 2")
        text = await page.text()
        for shown in ("Judgements", "1 awaiting, 1 judged; the oldest awaits one for", "held-out chats", "0.250"):
            assert shown in text, shown
        assert not page.complaints


class Mute(EngineStub):
    """An engine of another kind: its /detokenize answers, and not with a text."""

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"text": "?"})


async def test_tokens_whose_text_the_engine_does_not_tell_are_shown_by_their_ids(page: Page, tmp_path: Path) -> None:
    async with Mute() as stub, serving(tmp_path / "data", upstream=(stub.url,)) as client:
        await client.chat("ep")
        await page.open(f"{client.app.url}/ajet/#/e/ep")
        await page.until("document.querySelector('.tokens')")
        [timeline] = (await client.control("GET", "/episodes/ep?tokens=timelines")).json["timelines"]
        shown = "[...document.querySelectorAll('.tokens .c, .tokens .s')].map(one => one.textContent.trim())"
        assert await page.run(shown) == [f"#{token}" for token in timeline["token_ids"]]
        assert "shown by their ids: the engine's /detokenize gives no text" in await page.text()


async def test_each_model_has_its_own_words_for_an_id(page: Page, tmp_path: Path) -> None:
    async with EngineStub(models=()) as stub, serving(
        tmp_path / "data", upstream=(f"one={stub.url}", f"two={stub.url}")
    ) as client:
        members = {"planner": "one", "writer": "two"}
        episode = await client.open({"task": "t", "members": members})
        for agent, model in members.items():
            body = CHAT | {"model": model}
            answer = await client.ask("POST", f"/e/{episode}/v1/chat/completions", body, **{"X-AJet-Agent": agent})
            assert answer.status == 200
        await client.control("POST", f"/episodes/{episode}/rewards", {"value": 0.5, "note": "the only one"})
        await page.open(f"{client.app.url}/ajet/")
        await page.until("document.querySelector('#episodes')")
        await page.run("detokenize = async (model, ids) => ids.map((id) => `<${model} ${id}>`).join('')")
        await page.run(f"location.hash = '#/e/{episode}'")
        for place, model in enumerate(members.values()):
            await page.until("document.querySelector('.tokens')")
            await page.run(f"document.querySelectorAll('.tree button')[{place}].click()")
            shown = await page.run("[...document.querySelector('.tokens').children].map(one => one.textContent)")
            assert shown and all(text.startswith((f"<{model} ", "call 1 ")) for text in shown)
        assert "the only one" in await page.text()


async def test_signs_that_turn_the_direction_of_text_are_seen(page: Page, tmp_path: Path) -> None:
    turned = "said\u202ederevo\u2066"
    async with EngineStub() as stub, serving(tmp_path / "data", upstream=(stub.url,)) as client:
        episode = await play(client, turned, "x", agent=turned)
        await page.open(f"{client.app.url}/ajet/#/e/{episode}")
        await page.until("document.querySelector('.tokens')")
        text = await page.text()
        assert "said\\u202ederevo\\u2066" in text
        assert "\u202e" not in text
        assert await page.run("tokenNode(7, 'a\\u202eb', null).textContent") == "a\\u202eb"


async def test_it_finds_back_from_an_episode_that_is_none_and_from_a_proxy_that_was_away(
    page: Page, tmp_path: Path
) -> None:
    async with serving(tmp_path / "data") as client:
        await page.open(f"{client.app.url}/ajet/#/e/none")
        await page.until("document.querySelector('.alert')")
        text = await page.text()
        assert "no episode none" in text
        assert "no answer" not in text
    await page.run("document.querySelector('main p a').click()")
    await page.until("document.body.innerText.includes('no answer, trying again')")
    async with serving(tmp_path / "data", listen=client.app.url.removeprefix("http://")):
        await page.until("document.querySelector('#episodes')")


async def test_a_name_without_end_leaves_the_tokens_in_sight(page: Page, tmp_path: Path) -> None:
    async with EngineStub() as stub, serving(tmp_path / "data", upstream=(stub.url,)) as client:
        episode = await play(client, "L" * 1000, "x", agent="wide " * 200)
        await page.look(width=420)
        await page.open(f"{client.app.url}/ajet/#/e/{episode}")
        await page.until("document.querySelector('.tokens')")
        assert await page.run("document.querySelector('.tokens').getBoundingClientRect().top") < 900


async def test_with_keys_on_it_asks_for_one_and_keeps_it_out_of_every_address(page: Page, tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "admin_secret": SECRET}
    async with EngineStub() as stub, serving(**settings, upstream=(stub.url,)) as client:
        key = client.key(Claims("admin"))
        episode = await play(client, "t", "said", key=key)
        await page.open(f"{client.app.url}/ajet/")
        await page.until("document.querySelector('input[type=password]')")
        await enter(page, "a key … cut off")
        await page.until("document.body.innerText.includes('this is no key')")
        await enter(page, client.key(Claims("trainer")))
        await page.until("document.body.innerText.includes('admin')")
        await page.until("document.querySelector('input[type=password]')")
        await enter(page, key)
        await page.until("document.querySelector('#episodes')")
        assert "any model" in await page.text()
        await page.run(f"location.hash = '#/e/{episode}'")
        await page.until("document.querySelector('.tokens')")
        assert "said" in await page.run("document.querySelector('.tokens').textContent")
        assert not [url for url in page.requests if key in url or "ajet-" in url]
        assert await page.run("sessionStorage.getItem('ajet-key')") == key
        assert await page.run("document.cookie + JSON.stringify(localStorage)") == "{}"
        await press(page, "forget the key")
        await page.until("document.querySelector('input[type=password]')")
        assert await page.run("sessionStorage.getItem('ajet-key')") is None


async def press(page: Page, name: str) -> None:
    await page.run(f"[...document.querySelectorAll('button')].find(one => one.innerText === {name!r}).click()")


async def enter(page: Page, key: str) -> None:
    field = f"document.querySelector('input[type=password]').value = {json.dumps(key)}"
    await page.run(f"{field}; document.querySelector('form button').click()")


async def test_ten_thousand_episodes_are_shown_in_pages(page: Page, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    store = Store.open(tmp_path / "data", LedgerSettings())
    for number in range(10_000):
        store.post((EpisodeOpened(
            at=time.time(), episode=f"ep-{number:05d}", task="t", model=None, agent=None, eval=False, metadata={},
            identified_by="key", tenant="", idle_timeout=9e9, wall_timeout=9e9, members=None,
        ),))
    await store.close()
    async with serving(tmp_path / "data") as client:
        await page.open(f"{client.app.url}/ajet/")
        await page.until(f"{ROWS} === 50 && document.body.innerText.includes('10,000 episodes')")
        assert await page.run("document.querySelectorAll('*').length") < 2000
        assert "ep-09999" in await page.run("document.querySelector('#episodes').innerText")
        await press(page, "older")
        await page.until("document.querySelector('#episodes').innerText.includes('ep-09949')")
        assert await page.run(ROWS) == 50
        await press(page, "newer")
        await page.until("document.querySelector('#episodes').innerText.includes('ep-09999')")


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
async def test_nothing_is_wider_than_the_screen(page: Page, tmp_path: Path, width: int, dark: bool) -> None:
    async with EngineStub() as stub, serving(tmp_path / "data", upstream=(f"stub={stub.url}",)) as client:
        episode = await play(client, "t" * 150, "long " * 100)
        await page.look(width=width, dark=dark)
        for address, there in ((f"#/e/{episode}", ".tokens"), ("#/", "#episodes td")):
            await page.open(f"{client.app.url}/ajet/{address}")
            await page.until(f"document.querySelector('{there}')")
            assert await page.run("document.documentElement.scrollWidth") <= width
        ground = await page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark


async def test_every_column_is_in_sight_beside_long_names(page: Page, tmp_path: Path) -> None:
    async with EngineStub() as stub, serving(tmp_path / "data", upstream=(f"stub={stub.url}",)) as client:
        for reward in (1.0, None):
            await play(client, "task " * 40, "x", agent="wide " * 40, reward=reward)
        await page.look(width=1200)
        await page.open(f"{client.app.url}/ajet/")
        await page.until(f"{ROWS} === 2")
        tables = "[...document.querySelectorAll('.wide')]"
        assert await page.run(f"{tables}.every(one => one.scrollWidth <= one.clientWidth)")


async def test_a_long_timeline_is_shown_in_parts_and_a_file_needs_no_daemon(page: Page, tmp_path: Path) -> None:
    count = 10_000
    timeline = {
        "sample": "e/0", "model": "m", "agent": "", "token_ids": list(range(count)), "calls": ["c"],
        "loss_mask": [0] * (count - 2) + [1, 1], "logprobs": [0.0] * (count - 2) + [-0.1, -2.0], "broken_by": None,
        "policy_versions": [[1, 1], [2, 1]], "spans": [["c", count - 2, count]],
    }
    record = {"episode": "e", "task": EVIL, "state": "ready", "reward": 0.5, "calls": [], "timelines": [timeline]}
    sections = [{"heading": "Late", "episodes": [record]}]
    file = tmp_path / "page.html"
    file.write_text(still_page("Title", EVIL, sections, dict.fromkeys(range(count), EVIL)))
    await page.open(file.as_uri())
    await page.until("document.querySelector('.tokens')")
    tokens = "document.querySelectorAll('.tokens .c, .tokens .s').length"
    assert await page.run(tokens) == 3000
    for _ in range(3):
        await press(page, "later")
    assert await page.run(tokens) == 3000
    versions = "[...document.querySelectorAll('.tokens .s')].map(one => one.dataset.t.slice(-1)).join('')"
    assert await page.run(versions) == "12"
    await nothing_foreign(page, file.as_uri())
    assert not page.complaints
