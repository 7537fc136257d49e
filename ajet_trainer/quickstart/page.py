"""The token-level page: episodes as the trainer sees them, in one file that asks nobody for anything.

It is the daemon's own page (`ajet_sdk.page`) with the episodes and the texts of their tokens in it. Tokens are decoded
one by one, for display alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ajet_sdk.page import still_page

Decode = Callable[[int], str]


def page_html(
    title: str, intro: str, sections: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], decode: Decode
) -> str:
    """The whole page; `sections` are headings with their episode records, read with token ids."""
    shown = [
        {"heading": heading, "episodes": [_without_calls_tokens(record) for record in records]}
        for heading, records in sections
    ]
    timelines = [line for _, records in sections for record in records for line in record.get("timelines", ())]
    ids = {token for timeline in timelines for token in timeline["token_ids"]}
    return still_page(title, intro, shown, {token: decode(token) for token in sorted(ids)})


def _without_calls_tokens(record: Mapping[str, Any]) -> dict[str, Any]:
    """The timelines hold every token once; its calls would repeat them."""
    left_out = ("prompt_token_ids", "token_ids", "logprobs")
    calls = [{name: value for name, value in call.items() if name not in left_out} for call in record["calls"]]
    return {**record, "calls": calls}


def decoder(model: Path) -> Decode:
    """Decodes single tokens with the tokenizer of the model in `model`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def decode(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False))

    return decode
