"""The rows that a step trained, for reading: a table for a terminal, or a JSON object a row.

The texts of tokens come from the tokenizer in the model's folder, or in the run's checkpoints. Where there is none, or
nothing is installed that reads it, there are ids alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ajet_sdk.text import align, plain
from ajet_trainer.trained_rows import TrainedRow

Text = Callable[[int], str]
HEAD = ("id", "mask", "engine", "trainer", "advantage", "weight", "text")
UNKNOWN = "\ufffd"
"""The sign for bytes that are no whole character."""
SPACE = "\u2581"
"""The sign of tokenizers of one kind for a space."""


def reader(model: str, saved: Sequence[Path]) -> Text | None:
    """The text of a token to `model`, whose tokenizer is in its folder or in one of `saved`. None where nobody can
    tell."""
    files = [folder / "tokenizer.json" for folder in (Path(model), *saved)]
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    found = next((path for path in files if path.is_file()), None)
    if found is None:
        return None
    tokenizer = Tokenizer.from_file(str(found))

    def text(token: int) -> str:
        said, piece = tokenizer.decode([token], skip_special_tokens=False), tokenizer.id_to_token(token) or ""
        if not said or UNKNOWN in said:
            return piece
        return f" {said}" if piece.startswith(SPACE) else said

    return text


def json_line(step: int, one: TrainedRow, text: Text | None) -> str:
    """A row as JSON. What is said of tokens are lists over prompt and response, with null where there is nothing."""
    row, before = one.row, len(one.row.prompt)
    ids = [*row.prompt.tolist(), *row.response.tolist()]
    calls: list[str | None] = [None] * len(ids)
    for call, start, end in row.spans:
        calls[before + start : before + end] = [call] * (end - start)

    def over_all(values: Sequence[float]) -> list[float | None]:
        shown = [value if sampled else None for value, sampled in zip(values, row.mask.tolist(), strict=True)]
        return [None] * before + shown

    known = {"engine": row.logprobs, "trainer": one.trainer, "advantage": one.advantage}
    known |= {} if one.weight is None else {"weight": one.weight}
    return json.dumps({
        "step": step, "episode": row.episode, "task": row.task, "group": row.group, "session": row.session,
        "index": row.index, "reward": row.reward, "temperature": row.temperature, "ids": ids,
        "texts": None if text is None else [text(token) for token in ids], "calls": calls,
        "mask": [0] * before + one.mask.tolist(),
        **{name: over_all(values.tolist()) for name, values in known.items()},
    })  # fmt: skip


def table(step: int, one: TrainedRow, text: Text | None) -> str:
    """A row for a terminal: what it belongs to, its prompt in one piece, and a line for each token of its response."""
    row = one.row
    head = (
        f"step {step}, episode {row.episode}, task {row.task}: reward {row.reward:g}, temperature {row.temperature:g}, "
        f"{len(row.prompt)} prompt tokens, {int(one.mask.sum())} trained of {len(row.response)}"
    )
    lines = align([HEAD, *(_token(one, place, text) for place in range(len(row.response)))]).split("\n")
    titles = {start: f"call {call}" for call, start, _ in row.spans}
    titles |= {end: "not sampled" for _, _, end in row.spans if end < len(row.response) and end not in titles}
    out = [head, f"  prompt  {_shown(row.prompt.tolist(), text)}", f"  {lines[0]}"]
    for place, line in enumerate(lines[1:]):
        out += [f"  {titles[place]}"] if place in titles else []
        out.append(f"    {line}")
    return plain("\n".join(out)) + "\n"


def _token(one: TrainedRow, place: int, text: Text | None) -> tuple[str, ...]:
    row, token = one.row, int(one.row.response[place])
    sampled = bool(row.mask[place])
    values = (row.logprobs, one.trainer, one.advantage, one.weight)
    figures = (f"{values[place]:.4f}" if sampled and values is not None else "" for values in values)
    return str(token), str(int(one.mask[place])), *figures, "" if text is None else _shown([token], text)


def _shown(tokens: Sequence[int], text: Text | None) -> str:
    """Tokens in one line: their text in quotes, or their ids."""
    if text is None:
        return " ".join(map(str, tokens))
    return json.dumps("".join(map(text, tokens)), ensure_ascii=False)
