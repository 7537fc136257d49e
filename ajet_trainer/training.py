"""Puts a run together: its folder, the link to the proxy, the engines, the backend; and takes it apart again.

A first SIGTERM or SIGINT lets the step in progress finish, saves and acknowledges it, and ends with status 0. A second
one, or a first one while the parts are still starting, ends at once. Either way untrained batches go back to the proxy,
the gate opens, and all that the backend has started ends before this process does.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType

from ajet_sdk.errors import AjetError
from ajet_sdk.settings import ConfigError
from ajet_trainer.backends import backend
from ajet_trainer.candidate import NotPromoted
from ajet_trainer.config import Config, digest, find_model
from ajet_trainer.engines import same_model
from ajet_trainer.engines.attached import attached
from ajet_trainer.keeper import Keeper
from ajet_trainer.learner import Learner
from ajet_trainer.link import Link
from ajet_trainer.presence import Presence, trainer_of
from ajet_trainer.progress import Progress
from ajet_trainer.run_folder import hold
from ajet_trainer.step import Run


class Stop:
    """The wish of the signals. Until `graceful` is set, a signal raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        self.requested = False
        self.graceful = False

    def install(self) -> None:
        """A backend's libraries may replace handlers when they start, so this is called again after that."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.graceful:
            raise KeyboardInterrupt
        self.requested = True


class TrainingFailed(AjetError):
    """Something in the engines failed; the message is one line, the whole story is in the log of the run folder."""

    type = "training_failed"


Live = Callable[[Config], Config]
"""The configuration in force as it is now, of what it was."""


def train(config: Config, say: Callable[[str], None], live: Live = lambda config: config) -> None:
    """Trains until the planned number of steps or a signal. What goes wrong is raised as an `AjetError`.

    The libraries of the backend write what they have to say into its log in the run folder. Where weights are not
    promoted, this process becomes a new one over the same command, which begins at the last checkpoint.
    """
    environ = dict(os.environ)
    find_model(config)
    stop = Stop()
    stop.install()
    log = Path(config.run_dir) / backend().log
    try:
        progress = Progress(config.run_dir, config.total_steps, say, digest(config))
        held = hold(progress.run_dir)
        opened = log.open("a", buffering=1)
    except BlockingIOError:
        raise ConfigError(f"another trainer is at work in run_dir {config.run_dir!r}", param="run_dir") from None
    except OSError as error:
        raise ConfigError(f"run_dir {config.run_dir!r} cannot be written to: {error}", param="run_dir") from error
    with held, opened as file, redirect_stdout(file), redirect_stderr(file):
        try:
            assemble(config, progress, stop, live)
        except NotPromoted:
            stop.graceful = False  # a signal from here on would be lost as this process becomes its next one
            if stop.requested:
                ends(progress, "stopped")
                return
            ends(progress, "starting again")
            with suppress(OSError):
                file.flush()
            os.set_inheritable(held.fileno(), True)  # a lock is lost as the first descriptor of its file is closed
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
        except AjetError:
            ends(progress, "failed")
            raise
        except KeyboardInterrupt:
            ends(progress, "stopped")
            raise
        except Exception as error:
            ends(progress, "failed")
            with suppress(OSError):
                traceback.print_exc(file=file)
            raise TrainingFailed(f"{first_words(error)} (more in {log})") from error


def ends(progress: Progress, phase: str) -> None:
    """Writes the last phase of a run. A disk that is full must not hide why it ends."""
    with suppress(OSError):
        progress.phase(phase, quiet=True)


def first_words(error: Exception) -> str:
    """The words of an error in one line: its first line, and the next if the first only announces it. An error of
    another process brings that one's traceback, and then the line behind that says what happened."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    if frames and any(line.startswith(("ray::", "Traceback ", "\x1b[36mray::")) for line in lines):
        return next((line for line in lines[frames[-1] :] if line[:1].strip()), lines[-1])
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def assemble(config: Config, progress: Progress, stop: Stop, live: Live = lambda config: config) -> None:
    """Brings everything up in order, trains, and takes it down in the opposite order. The proxy is asked first: a wrong
    address or key shows before a minute is spent on loading."""
    progress.phase("looking for the proxy")
    with closing(Link.of(config, trainer=trainer_of(config))) as link:
        link.meet()
        with Presence(link):
            same_model.look(config, {})
            with (
                attached(config, link.check, progress.say) as engines,
                backend().open(config, engines, progress, stop.install) as learner,
            ):
                serve(config, link, learner, progress, stop, live)


def serve(config: Config, link: Link, learner: Learner, progress: Progress, stop: Stop, live: Live) -> None:
    """The run itself, with everything up."""
    with Keeper(link) as keeper:
        run = Run(config, link, learner, keeper, progress, stopping=lambda: stop.requested, live=live)
        try:
            run.start()
            progress.phase(f"training from step {learner.version}")
            stop.graceful = True
            run.loop()
            progress.phase("stopped" if stop.requested else "done")
        finally:
            run.close()
