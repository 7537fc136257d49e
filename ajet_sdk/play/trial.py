"""``ajet try``: one episode that is never trained, shown as it happens.

The program's own output comes through as it is. In between stands each call to the model: what is new in its prompt,
its answer, and its tokens. The text is the engine's own reading of the token ids that the proxy has recorded. An engine
without ``/detokenize`` leaves the counts alone.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ajet_sdk.blocking import Client, wait
from ajet_sdk.client import Reply, Send
from ajet_sdk.errors import AjetError, NotReady, ProxyUnreachable
from ajet_sdk.output import INTERRUPTED, Copies, say
from ajet_sdk.play.blocking import Episode
from ajet_sdk.play.episode import opening, reading
from ajet_sdk.play.options import RunOptions
from ajet_sdk.play.program import Program, ProgramAgent
from ajet_sdk.play.results import RunResult
from ajet_sdk.play.rollouts import result_of
from ajet_sdk.text import counted, plain
from ajet_sdk.tree import common_prefix

LOOK_S, LOOK_DEADLINE_S = 0.2, 2.0
"""The time between two looks, and how long one is tried."""
MOST_TOKENS, MOST_TEXT = 400, 600
"""At most so many tokens are asked for as text, and so many characters of it shown."""
MOST_READ = 20_000_000
"""Once so many tokens were read, no more texts are shown: for each call those of all are read."""
DETOKENIZE_S = 5.0


class Calls:
    """Shows each call once as it begins, and once as it ends."""

    def __init__(self, client: Client, episode: Episode, show: Callable[[str], None]) -> None:
        self._client, self._episode, self._show = client, episode, show
        self._begun: dict[str, int] = {}
        self._ended: set[str] = set()
        self._tokens = 0

    def look(self) -> None:
        """Shows what is new."""
        record = self._record(tokens=False)
        for call in record.get("calls") or []:
            name = str(call.get("call"))
            if name not in self._begun:
                self._begun[name] = len(self._begun) + 1
                asks = f"asks {call.get('model') or 'a model'}"
                self._show(f"→ call {self._begun[name]} {asks}" + (f" as {call['agent']}" if call.get("agent") else ""))
            if name not in self._ended and not call.get("in_flight"):
                self._ended.add(name)
                self._show(self._end(name, call))

    def _end(self, name: str, call: Mapping[str, Any]) -> str:
        number = self._begun[name]
        if not call.get("complete"):
            return f"← call {number} is lost: {call.get('reason') or 'not complete'}"
        prompt, sampled = call.get("prompt_tokens", 0), call.get("sampled_tokens", 0)
        lines = [f"← call {number}: {prompt} tokens read, {sampled} sampled, {call.get('finish_reason') or 'no end'}"]
        if self._tokens >= MOST_READ:
            return lines[0]
        with suppress(AjetError, ValueError, TypeError, KeyError):
            new, answer = self._texts_of(name)
            lines += [_indented("in", new, last=True), _indented("out", answer, last=False)]
        return "\n".join(lines)

    def _texts_of(self, name: str) -> tuple[str, str]:
        """The texts of what is new in the prompt of a call, and of its answer."""
        calls = {str(one["call"]): one for one in self._record(tokens=True)["calls"] if one.get("complete")}
        call, before = calls[name], list(calls.values())[: list(calls).index(name)]
        prompt = call["prompt_token_ids"]
        self._tokens += sum(len(one["prompt_token_ids"]) + len(one["token_ids"]) for one in calls.values())
        texts = [array("i", [*one["prompt_token_ids"], *one["token_ids"]]).tobytes() for one in before]
        known = max((common_prefix(array("i", prompt).tobytes(), text) for text in texts), default=0)
        model = str(call["model"])
        new = self._detokenized(model, prompt[known:][-MOST_TOKENS:])
        return new, self._detokenized(model, call["token_ids"][:MOST_TOKENS])

    def _detokenized(self, model: str, tokens: Sequence[int]) -> str:
        body = json.dumps({"model": model, "tokens": list(tokens)}).encode()
        target, headers = self._client.target, {"content-type": "application/json"}
        if target.key:  # and not the episode's, which opens nothing once that has ended
            headers["authorization"] = f"Bearer {target.key}"
        send = Send("POST", f"{target.url}/detokenize", headers, body, DETOKENIZE_S)
        reply = wait(self._client.core.attempt(send))
        return str(reply.json()["prompt"]) if isinstance(reply, Reply) else ""

    def _record(self, *, tokens: bool) -> dict[str, Any]:
        return wait(reading(self._client.core.but(deadline=LOOK_DEADLINE_S), self._episode.id, tokens))


def _indented(label: str, text: str, *, last: bool) -> str:
    """`text` behind `label`, cut to its last or first characters."""
    text = plain(text.strip())
    if len(text) > MOST_TEXT:
        text = f"… {text[-MOST_TEXT:]}" if last else f"{text[:MOST_TEXT]} …"
    return f"  {label:>3}  " + text.replace("\n", "\n       ")


def try_and_show(client: Client, program: Program, task: str, options: RunOptions) -> int:
    """Plays one episode of `program`, and shows it; the exit code."""
    copies, error = Copies(named=False), None
    with ProgramAgent(program, client, copies, say=say) as runs:
        named = options.model or options.members or options.teachers
        hold_s = 0.0 if named else None  # no wait for engines that may never come
        body = options.opening(task=task, trial=True, hold_s=hold_s)
        episode = Episode(client.core, wait(opening(client.core, body)))
        copies.text(f"episode {episode.id} of task {plain(task)}, policy version {episode.policy_version}")
        calls, ended = Calls(client, episode, copies.text), threading.Event()
        watcher = threading.Thread(target=_watch, args=(calls, ended), daemon=True)
        watcher.start()
        try:
            with episode:
                runs(task, episode)
        except KeyboardInterrupt:
            known = episode.outcome is not None and episode.outcome.aborted is not None
            say(f"interrupted: {'the episode is aborted' if known else 'the episode ends by its timeouts'}")
            return INTERRUPTED
        except Exception as caught:
            error = caught
        finally:
            ended.set()
        watcher.join()
    return _show(client, episode, result_of(task, 0, episode, error, 0.0), calls, copies)


def _watch(calls: Calls, ended: threading.Event) -> None:
    while not ended.wait(LOOK_S):
        with suppress(AjetError):
            calls.look()


def _show(client: Client, episode: Episode, result: RunResult, calls: Calls, copies: Copies) -> int:
    """Shows what came of it, in a few lines. A proxy that is away has been waited for already."""
    record: Mapping[str, Any] = {}
    with suppress(ProxyUnreachable, NotReady):
        calls.look()
        record = wait(reading(client.core.but(deadline=LOOK_DEADLINE_S), episode.id))
    all_calls = record.get("calls") or []
    whole = [one for one in all_calls if one.get("complete")]
    sampled = sum(int(one.get("sampled_tokens", 0)) for one in whole)
    ended = f"reward {result.earned}" if result.ok and result.reward is not None else f"{result.outcome}"
    why = f": {'the world failed: ' if result.infra else ''}{result.reason}" if result.reason else ""
    if episode.program_failed is not None and episode.program_failed not in why:
        why = f" ({episode.program_failed}){why}"
    copies.text(plain(f"{ended}{why}"))
    lost = f", {len(all_calls) - len(whole)} of them lost" if len(whole) < len(all_calls) else ""
    copies.text(f"{counted(all_calls, 'call')}{lost}, {sampled} tokens sampled. Nothing of this is trained")
    copies.text(f"More of it: ajet show {episode.id}")
    return 0 if result.ok and whole else 1
