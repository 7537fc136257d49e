"""The agent's side of ajet: open episodes, reward them, run agents over tasks.

::

    ajet_sdk.reward(1.0)                        # in a process started by `ajet run`
    with ajet_sdk.episode(task="gsm8k/17") as ep:
        OpenAI(base_url=ep.base_url, api_key=ep.api_key)
        ep.reward(1.0)
    results = ajet_sdk.run(agent, tasks)        # agent(task, episode) -> reward

`ajet_sdk.aio` has the same for asyncio. Names are loaded when they are first used, so that importing this package
costs a few milliseconds; httpx is loaded by the first request.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajet_sdk import aio, errors
    from ajet_sdk.blocking import Client
    from ajet_sdk.errors import AjetError, ProxyUnreachable
    from ajet_sdk.play.blocking import Episode, abort, episode, join, reward
    from ajet_sdk.play.program import Program, run_program
    from ajet_sdk.play.results import RunResult, RunResults
    from ajet_sdk.play.threads import run
    from ajet_sdk.rewards.blame import Busy

__version__ = "0.1.0"
__all__ = [
    "AjetError", "Busy", "Client", "Episode", "Program", "ProxyUnreachable", "RunResult", "RunResults", "abort", "aio",
    "episode", "errors", "join", "reward", "run", "run_program",
]
_HOMES = ("errors", "rewards.blame", "blocking", "play.blocking", "play.results", "play.threads", "play.program")
"""Where these names are defined; each module imports only those before it."""


def __getattr__(name: str) -> Any:
    if name in ("aio", "errors"):
        return import_module(f"ajet_sdk.{name}")
    for home in _HOMES if name in __all__ else ():
        if hasattr(module := import_module(f"ajet_sdk.{home}"), name):
            return getattr(module, name)
    raise AttributeError(f"module 'ajet_sdk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
