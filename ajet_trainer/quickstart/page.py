"""The token-level page: episodes as the trainer sees them, each token with what is known of it.

Sampled tokens (mask 1) stand on a coloured ground, deeper the more surprising they were; everything else is context.
Hovering shows id, logprob and policy version. The page is one file that asks nobody for anything; it has no script.
Tokens are decoded for display alone.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Decode = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Token:
    """`logprob` and `version` are None where the mask is 0."""

    id: int
    logprob: float | None = None
    version: int | None = None


def rows_of(calls: Iterable[Mapping[str, Any]]) -> list[list[Token]]:
    """Calls (contract section 6, with token ids) as token rows: a call that goes on where a row ends extends it."""
    rows: list[list[Token]] = []
    complete = [call for call in calls if call.get("complete", True)]
    for call in sorted(complete, key=lambda call: (call["started_at"], call["call"])):
        prompt = call["prompt_token_ids"]
        fitting = [row for row in rows if [token.id for token in row] == prompt[: len(row)]]
        row = max(fitting, key=len, default=None)
        if row is None:
            row = []
            rows.append(row)
        row += [Token(token) for token in prompt[len(row) :]]
        row += [
            Token(token, logprob, version)
            for token, logprob, version in zip(
                call["token_ids"],
                call["logprobs"],
                versions_of(call["policy_version"], len(call["token_ids"])),
                strict=True,
            )
        ]
    return rows


def versions_of(version: int | Sequence[Sequence[int]], count: int) -> list[int]:
    """A call's policy version for each of its `count` tokens."""
    if isinstance(version, int):
        return [version] * count
    return [number for number, times in version for _ in range(times)]


def token_html(token: Token, text: str) -> str:
    """One token. Line ends are shown and made."""
    shown = html.escape(text).replace("\n", "<b>↵</b>\n") or "<b>∅</b>"
    special = " x" if text.startswith("<|") and text.endswith("|>") else ""
    if token.logprob is None:
        return f'<span class="c{special}" data-t="id {token.id} · context, mask 0">{shown}</span>'
    depth = round(min(1.0, -token.logprob / 4), 2)
    chance = math.exp(token.logprob)
    about = f"id {token.id} · logprob {token.logprob:.3f} (p = {chance:.3f}) · policy version {token.version}"
    return f'<span class="s{special}" style="--d:{depth}" data-t="{about}">{shown}</span>'


def episode_html(record: Mapping[str, Any], decode: Decode) -> str:
    """One episode as a card."""
    rows = rows_of(record["calls"])
    versions = sorted({token.version for row in rows for token in row if token.version is not None})
    sampled = sum(token.logprob is not None for row in rows for token in row)
    reward = record["reward"] if record["reward"] is not None else math.nan
    facts = [
        ("task", record["task"]),
        ("policy version", ", ".join(map(str, versions)) or "none"),
        ("calls", len(record["calls"])),
        ("samples", len(rows)),
        ("tokens", f"{sum(map(len, rows))}, {sampled} sampled"),
        ("state", record["state"]),
        ("episode", record["episode"]),
    ]
    about = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd></div>" for name, value in facts
    )
    text = "".join("<pre>" + "".join(token_html(token, decode(token.id)) for token in row) + "</pre>" for row in rows)
    share = min(max(reward, 0.0), 1.0) if not math.isnan(reward) else 0.0
    return (
        f'<article><header><p class="r"><span>reward</span> {reward:.3f}</p>'
        f'<div class="bar"><i style="width:{share:.1%}"></i></div></header><dl>{about}</dl>{text}</article>'
    )


def page_html(
    title: str, intro: str, sections: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], decode: Decode
) -> str:
    """The whole page; `sections` are headings with their episode records."""
    body = ""
    for heading, records in sections:
        cards = "".join(episode_html(record, decode) for record in records)
        body += f"<section><h2>{html.escape(heading)}</h2>{cards}</section>"
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return (
        template.replace("{{title}}", html.escape(title))
        .replace("{{intro}}", html.escape(intro))
        .replace("{{body}}", body)
    )


def decoder(model: Path) -> Decode:
    """Decodes single tokens with the tokenizer of the model in `model`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def decode(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False))

    return decode
