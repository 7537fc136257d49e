"""The splice: the tokens that a template writes between an answer and the assistant's next turn, and the exact prompt.

Idea: no table of templates. The engine renders the conversation with words of ours, the placeholder, in place of the
last answer. What it writes after the placeholder is the tail: the end of the answer's turn, the new messages, and the
opening of the next turn. The exact prompt is the history (all that the engine read and sampled, as ids) followed by the
tail. The tail begins with the stop token. If the engine has sampled that already, it is not repeated.

Invariant: a prompt made here begins with the history, token for token. What follows is text that the engine itself puts
at the end of this very conversation. The tail counts only if nothing in it can depend on the placeholder. So the
placeholder's tokens must stand whole and in one place: then none has merged with the tail. And the rendering of the
real conversation must end with the same tail. The history must end where the tail begins. It may end with the tail's
first token, which the engine sampled and stopped at. Or its answer was cut at the length limit, in the middle of a
turn. A cut answer that calls tools counts only if its call is closed: the template would close an open one, and the
tail does not have that.

Next: ajet_proxy/io/capture/relay.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ajet_proxy.core.tokens import WIDTH, count, cut, find, pack_tokens, unpack_tokens

Ids = Sequence[int]
NoPrompt = Literal["no_joint", "stop_token"]


def begins_with(prompt: Ids, history: Ids) -> bool:
    """Tell whether `prompt` continues `history`, token for token."""
    return tuple(prompt[: len(history)]) == tuple(history)


def joined(
    *, history: Ids, ended: str, rendered: Ids, marked: Ids, placeholder: Ids
) -> tuple[int, ...] | NoPrompt:
    """The exact prompt, or the word for why there is none.

    `history` ends with what was sampled, and ``ended`` says how (see `memory.Known`). `rendered` is the conversation as
    the engine renders it. `marked` is the same, with the tokens `placeholder` in place of the last answer.
    """
    tail = _behind(pack_tokens(marked), pack_tokens(placeholder[len(placeholder) // 2 :]))
    if not tail or not pack_tokens(rendered).endswith(tail):
        return "no_joint"
    behind = unpack_tokens(tail)
    if ended != "length" and history[-1] == behind[0]:
        return (*history, *behind[1:])
    closing = rendered[: -len(behind)][-1:]
    closed = ended == "call" and tuple(closing) == tuple(history[-1:])
    return (*history, *behind) if closed or ended == "length" else "stop_token"


def _behind(marked: bytes, placeholder: bytes) -> bytes:
    """The tokens that follow the one place of `placeholder`; nothing if it has no place, or two. Callers give its
    second half alone, since the first may have merged with what stands before it."""
    end = count(marked)
    at = find(marked, placeholder, 0, end)
    if at < 0 or find(marked, placeholder, at + 1, end) >= 0:
        return b""
    return cut(marked, at + len(placeholder) // WIDTH, end)
