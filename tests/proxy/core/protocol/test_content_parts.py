"""What is more than text: by its type, by its key, by its name in the engine's cache."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.protocol.content_parts import beyond_text

TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize("content", [
    None, 5, "a", [], ["a"], [TEXT], [TEXT, {"type": "input_text", "text": "a"}], [{"type": "output_text"}],
    [{"text": "a"}], [{"type": "refusal"}], [{"type": "thinking"}], [{"type": "tool_reference"}], [5, None],
])  # fmt: skip
def test_text(content: Any) -> None:
    assert not beyond_text(content)


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_image"}, {"type": "input_audio"},
    {"type": "video_url"}, {"type": "file"}, {"type": "image_embeds"}, {"type": "prompt_embeds"},
    {"image_url": "x"}, {"type": None, "image_url": "x"}, {"text": "a", "image_url": "x"}, {}, {"type": []},
    {"type": "text", "image_url": "x", "uuid": "kept"},
])  # fmt: skip
def test_more_than_text(part: Any) -> None:
    assert beyond_text([part]) and beyond_text([TEXT, part])
