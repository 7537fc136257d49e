"""Parts of a message: which are text, so that its token ids tell all that the model reads.

Of an image, a sound or an embedding the ids hold a placeholder, and a sample made of them would teach an answer to
something that is not there. So whatever is not known to be text is taken to be more: vLLM finds an image also by its
key alone, where the part has no type, and by its ``uuid``.
"""

from __future__ import annotations

from typing import Any

_TEXT = (
    "text", "input_text", "output_text", "refusal", "thinking", "tool_reference", "reasoning_text", "summary_text"
)  # fmt: skip


def beyond_text(content: Any) -> bool:
    """Whether `content`, a text or a list of parts, holds an image, a file or another thing that ids do not tell."""
    return isinstance(content, list) and not all(map(_is_text, content))


def _is_text(part: Any) -> bool:
    if not isinstance(part, dict) or part.keys() == {"text"}:
        return True
    return part.get("type") in _TEXT and part.get("uuid") is None
