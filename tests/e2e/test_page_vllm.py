"""The owner's page before a real vLLM: every token has the text that the model's own tokenizer gives it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Engine
from tests.kit.browser import MISSING, browsing, find
from tests.kit.proxy_process import ProxyProcess

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.skipif(find() is None, reason=MISSING)]


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


async def test_the_text_of_each_token_comes_from_the_engine(vllm: Engine, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(vllm.model / "tokenizer.json"))
    with ProxyProcess(f"tiny={vllm.url}", tmp_path / "data") as proxy:
        messages = [{"role": "user", "content": "naïve 名前 <b>12</b> + 30 =  ?\n\tend"}]
        ask(f"{proxy.url}/e/run-1/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 40})
        (timeline,) = ask(f"{proxy.url}/ajet/v1/episodes/run-1?tokens=timelines")["timelines"]
        async with browsing(tmp_path / "profile") as page:
            await page.open(f"{proxy.url}/ajet/#/e/run-1")
            await page.until("document.querySelector('.tokens')")
            spans = "document.querySelectorAll('.tokens .c, .tokens .s')"
            shown = await page.run(f"[...{spans}].map(one => one.textContent)")
            assert not page.complaints
            asked = [url for url in page.requests if url.endswith("/detokenize")]
    expected = [tokenizer.decode([token], skip_special_tokens=False) for token in timeline["token_ids"]]
    assert [text.replace("↵\n", "\n").replace("∅", "") for text in shown] == expected
    assert len(asked) <= 3
