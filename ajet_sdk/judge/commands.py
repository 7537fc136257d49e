"""The command ``ajet judge``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ajet_sdk.commands import client_for, label, proxy_option, usage
from ajet_sdk.errors import BadRequest
from ajet_sdk.output import Copies, OnceCommand, say

if TYPE_CHECKING:
    from ajet_sdk.client import Client
    from ajet_sdk.judge.work import Work

RUN_S = 600.0
"""It waits so long for a proxy that went away."""
INTERRUPTED = "interrupted: what is being judged is posted first; interrupted again, it is left"
FILE = click.Path(exists=True, dir_okay=False)


@click.command(cls=OnceCommand)
@click.option("--rubric", metavar="FILE", type=FILE, help="With --model: by what to judge, in plain words.")
@click.option("--model", metavar="URL[#NAME]", help="A model judges, at this base URL. Its key is OPENAI_API_KEY.")
@click.option("--with", "function", metavar="FILE.py:NAME", help="NAME(episode) judges: {call: number}, or None.")
@click.option("--cmd", metavar="CMD", help="A shell runs CMD: the episode as JSON in, {call: number} as JSON out.")
@click.option("--name", default="judge", show_default=True, callback=label, help="What this judge is called.")
@click.option("--lane", callback=label, help="Judge this lane alone.")
@click.option("--votes", type=click.IntRange(1, 99), default=1, show_default=True, help="How often to ask the model.")
@click.option("--parallel", type=click.IntRange(1), default=1, show_default=True, metavar="P", help="How many at once.")
@click.option("--budget", metavar="TOKENS/day", help="With --model: what it may use in a day (UTC).")
@click.option("--relative", is_flag=True, help="Judge the episodes of a group at once, each as a whole.")
@click.option("--redact", metavar="FILE.py:NAME", help="NAME(episode) takes out what no judge may see. None withdraws.")
@click.option("--check", metavar="FILE", type=FILE, help="First tell how it agrees with these labelled answers.")
@click.option(
    "--feedback-weight", type=click.FloatRange(0, 1), default=0.5, show_default=True, metavar="W",
    help="How much a user's thumb counts, beside the judge. 0: it is ignored.",
)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
    help="For one answer of a model (120), or one call of a function or a command (3600).",
)
@click.option("--self", "insist", is_flag=True, help="Judge by a model that is being trained here.")
@proxy_option
def judge(proxy: str | None, **options: Any) -> None:
    """Judge the episodes that await a judgement, until it is interrupted.

    Exactly one of --model, --with and --cmd judges. The key needs scope judge. What is being judged at an interrupt is
    still posted. A second one does not wait for that.
    """
    from ajet_sdk.blocking import wait
    from ajet_sdk.play.guardian import Guardian

    if sum(options[one] is not None for one in ("model", "function", "cmd")) != 1:
        raise click.UsageError("name one of --model, --with and --cmd")
    if (options["model"] is None) != (options["rubric"] is None):
        raise click.UsageError("--model and --rubric go together")
    if options["model"] is None and (options["budget"] or options["votes"] > 1):
        raise click.UsageError("--votes and --budget go with --model")
    try:
        rubric = "" if options["rubric"] is None else Path(options["rubric"]).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the rubric is no UTF-8 text: {error}") from None
    with usage():
        gold = [] if options["check"] is None else labelled(Path(options["check"]).read_bytes())
    with client_for(proxy, RUN_S) as client:
        work: list[Work] = []
        try:
            with Guardian() if options["cmd"] is not None else nullcontext() as guardian:
                mark = guardian.mark if guardian is not None else {}
                asked = options | {"rubric": rubric, "gold": gold, "mark": mark}
                wait(_judged(client.core, asked, work), lambda: say(INTERRUPTED))
        except KeyboardInterrupt:
            pass
        finally:
            for one in work:
                Copies(named=False).text(one.summary())


async def _judged(client: Client, options: Mapping[str, Any], begun: list[Work]) -> None:
    """Judges until this is cancelled; adds to `begun` what it does."""
    from ajet_sdk.judge.judges import ASK_S, CALL_S, Function, Judge, Model, Rest, load
    from ajet_sdk.judge.work import Options, Work
    from ajet_sdk.rewards.judging import Budget

    rest, call_s = Rest(), options["timeout"] or CALL_S
    with usage():
        budget = Budget.parse(options["budget"])
        hook = None if options["redact"] is None else load(options["redact"])[0]
        judge: Judge
        if options["model"] is not None:
            judge = Model(
                options["model"], options["rubric"], votes=options["votes"], budget=budget,
                words=options["feedback_weight"] > 0, say=say, rest=rest, insist=options["insist"],
                timeout=options["timeout"] or ASK_S,
            )  # fmt: skip
        elif options["function"] is not None:
            judge = Function(*load(options["function"]), call_s)
        else:
            judge = Function.of_command(options["cmd"], options["mark"], call_s)
    how = Options(
        options["name"], options["lane"], options["parallel"], options["relative"], options["feedback_weight"], hook,
        call_s,
    )  # fmt: skip
    work = Work(client, judge, how, budget=budget, rest=rest, show=Copies(named=False).text, say=say)
    try:
        if isinstance(judge, Model):
            await judge.open()
            status = (await client.ask("status")).json()
            judge.refuse_itself(status["models"] | status.get("candidates", {}))
        if options["gold"]:
            say(await work.check(options["gold"]))
        begun.append(work)
        say(f"{how.name} ({judge.digest}) judges what awaits a judgement")
        await work.run()
    finally:
        if isinstance(judge, Model):
            await judge.close()


def labelled(data: bytes) -> list[dict[str, Any]]:
    """The labelled answers of a file, one a line: ``{"question", "answer", "value", "next"?}``."""
    out = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            found = json.loads(line)
            texts = found["question"], found["answer"], found.get("next", "")
            good = all(isinstance(one, str) for one in texts) and math.isfinite(found["value"])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            good = False
        if not good:
            raise BadRequest(f"line {number} is not {{\"question\": ..., \"answer\": ..., \"value\": NUMBER}}")
        out.append(found)
    return out
