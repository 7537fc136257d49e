"""Shows a run on the screen: a table at the end for one task, and a line for each rollout of a data set.

The lines go to standard output as the rollouts end, because a data set may take days. Whatever is not a result goes to
standard error.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ajet_sdk.blocking import Client
from ajet_sdk.errors import AjetError
from ajet_sdk.output import INTERRUPTED, Copies, say
from ajet_sdk.play.program import Program, proxy_variable, run_program
from ajet_sdk.play.results import Progress, RunResult, RunResults
from ajet_sdk.play.revision import of_program
from ajet_sdk.play.tasks import Line
from ajet_sdk.text import counted, plain
from ajet_sdk.untrainable import SIGNAL, UNTRAINABLE


class Screen:
    """Remembers what has been shown of a run. Of a data set, which is a `play`, each rollout is shown as it ends;
    `code` is the file from which its revision is read."""

    def __init__(self, play: str | None, code: Path | None, *, named: bool) -> None:
        self.copies = Copies(named=named)
        self.done: list[RunResult] = []
        self._kept = 0
        self._counting = threading.Lock()
        self._play, self._file = play, code
        self._before: Progress | None = None
        self._now: Progress | None = None

    def result(self, item: RunResult) -> None:
        with self._counting:
            self.done.append(item)
            self._kept += item.kept
        if self._play is not None:
            so_far = ""
            if self._before is not None:
                so_far = f"[{self._known().done}/{self._before.episodes}] "
            self.copies.text(result_line(item, so_far))

    def progress(self, found: Progress) -> None:
        """Says how far the play is as the run begins, and remembers it as it ends."""
        if self._before is not None:
            self._now = found
            return
        self._before = found
        if found.done:
            say(f"{self._play} goes on where it was left: {found.done} of {found.episodes} played")
        else:
            say(f"{self._play}: {found.episodes} episodes")
        if self._file is not None:
            say(f"the revision is that of {self._file}")

    def _known(self) -> Progress:
        """The progress of the play. Until its end, and if it was interrupted, what was kept is all that is known."""
        assert self._before is not None
        return self._now or replace(self._before, done=self._before.done + self._kept)

    def code(self) -> int:
        """0 if a play is whole, or if of other tasks any was rewarded and can be trained."""
        if self._before is not None:
            return 0 if self._known().done == self._before.episodes else 1
        found = RunResults(self.done)
        return 0 if found.kept or (found.rewards and not found.untrainable) else 1

    def show_progress(self) -> None:
        """Says what is left of a play for the next start, if anything is."""
        if self._before is not None and (found := self._known()).done < found.episodes:
            say(f"the next start goes on where this was left: {found.done} of {found.episodes} played")

    def end(self) -> None:
        """Shows the table, or for a data set a line that sums up."""
        results = RunResults(sorted(self.done, key=lambda item: item.index))
        if self.copies.lost is not None:
            say(f"some of the programs' output could not be written: {self.copies.lost}")
        text = results.table() if self._play is None else results.summary()
        sys.stdout.write(("" if self.copies.at_line_start else "\n") + text + "\n")
        sys.stdout.flush()


def result_line(item: RunResult, so_far: str) -> str:
    """One rollout of a data set in a line."""
    rewarded = f"{item.outcome} {item.earned}".rstrip()
    why = " ".join((item.reason or "").split())[:200]
    whose = "the world failed: " if item.infra else ""
    more = [f"{whose}{why}" if why else "", "played again" if item.again else ""]
    parts = [f"{item.task} #{item.index}", item.episode or "-", rewarded, f"{item.seconds:.1f} s", *filter(None, more)]
    return plain(so_far + "  ".join(parts)).replace("\n", " ")


def run_and_show(
    client: Client, program: Program, tasks: Sequence[str | Line], *, quiet: bool, watch: bool, **options: Any
) -> int:
    """Runs the episodes and shows them, also of a run that was interrupted; the exit code."""
    told = options["revision"] is None and not watch  # which says it itself
    code = of_program(program.argv, program.cwd).file if told else None
    screen = Screen(options.get("play"), code, named=options["parallel"] > 1)
    try:
        run_program(
            program, tasks, client=client, watch=watch, on_output=None if quiet else screen.copies,
            on_result=screen.result, on_progress=screen.progress, say=say, **options,
        )  # fmt: skip
        ended = screen.code()
    except KeyboardInterrupt:
        ended = INTERRUPTED
    except AjetError:
        if screen.done:
            screen.end()  # what came of the others is true all the same
        raise
    screen.end()
    _explain(screen.done, program, client, learns=not options["eval"])
    screen.show_progress()
    return ended


def _explain(done: Sequence[RunResult], program: Program, client: Client, *, learns: bool) -> None:
    """Says why nothing of a run, or not all of it, can be trained, as far as that is known."""
    results = RunResults(done)
    if why := next((item.untrainable for item in results.untrainable), None):
        some = f"{len(results.untrainable)} of them cannot" if results.kept else "nothing of this run can"
        say(f"{some} be trained: the engine {UNTRAINABLE[why].fault} ({why}); {UNTRAINABLE[why].remedy}")
    if several := [item for item in done if item.conversations > 1]:
        most = max(item.conversations for item in several)
        say(
            f"{len(several)} of {counted(done, 'episode')} held several conversations that do not go on from one "
            f"another (up to {most}), and one reward covers them all. If they are several runs, give each its own "
            "episode: in process (ajet_sdk.episode), by a header (X-AJet-Episode), by a path (/e/NAME/v1), or by "
            "POST /ajet/v1/episodes"
        )
    if learns and (flat := results.without_signal) is not None:
        say(f"every task {flat}: its group carries no signal, and nothing is learned of it: {SIGNAL}")
    if empty := [item for item in done if item.ok and not item.kept and item.untrainable is None]:
        needs = "use OPENAI_BASE_URL"
        if program.interception is not None:
            way = "use HTTPS_PROXY" if program.interception.url else "run where its connections are redirected"
            needs = f"{way}, trust SSL_CERT_FILE"
        lacking = f"{len(empty)} of them had no whole answer of a model"
        variable = None if program.interception else proxy_variable(client.target.url, os.environ)
        between = f" {variable} is set: does that proxy lead to {client.target.url}?" if variable else ""
        say(f"{lacking}: does the program {needs}, and see no errors?{between}")
