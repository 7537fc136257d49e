"""Completions with ``echo``, made from answers without the prompt.

Asked for ids, vLLM leaves the prompt out of the text that ``echo`` would begin with it. The prompt is the agent's own
text, so it is put back where the answer's text begins. Logprobs, which begin with the prompt's in either case, are read
from their end; in a stream their offsets count from the beginning of the text, so those of later events are moved on.
The engine tells an agent that asked for ``echo`` the prompt's ids in a stream, and not in a document.

To report the sampled tokens' logprobs it has to report the prompt's, too; they are put back to null.
"""

from __future__ import annotations

import json

from ajet_proxy.core.protocol.json_edits import Edits, Spanned, scan_at
from ajet_proxy.core.protocol.reading import Ask, Echo, OpenAIDialect, Reading


class EchoReading(Reading):
    """Reads an answer to `echo` and shows it with the prompt."""

    _puts_back = True

    def __init__(self, dialect: OpenAIDialect, ask: Ask, echo: Echo) -> None:
        super().__init__(dialect, ask)
        self._echo = echo
        self._begun: set[int] = set()

    def usual(self, stream: bytes) -> tuple[list[bytes], int]:
        return [], 0

    def _put_back(self, text: str, choice: Spanned, edits: Edits) -> None:
        values, spans = choice.values, choice.spans
        if values.get("prompt_logprobs") is not None and self._ask.hide_logprobs and not self._echo.prompt_logprobs:
            edits[spans["prompt_logprobs"]] = "null"
        index = values["index"]
        words = self._echo.texts[index] if type(index) is int and 0 <= index < len(self._echo.texts) else ""
        if not words or values.get("token_ids") is None or not isinstance(values["text"], str):
            return
        if index not in self._begun:
            self._begun.add(index)
            start = spans["text"][0] + 1
            edits[start, start] = json.dumps(words, ensure_ascii=False)[1:-1]
        elif values.get("logprobs") is not None and not self._ask.hide_logprobs:
            logprobs = scan_at(text, spans["logprobs"][0])
            moved = [offset + len(words) for offset in logprobs.values["text_offset"]]
            edits[logprobs.spans["text_offset"]] = json.dumps(moved, separators=(",", ":"))
