"""The agent's side of ajet: open episodes, reward them, run agents over tasks.

::

    ajet_sdk.reward(1.0)                        # in a process started by `ajet run`
    with ajet_sdk.episode(task="gsm8k/17") as ep:
        OpenAI(base_url=ep.base_url, api_key=ep.api_key)
        ep.reward(1.0)
    results = ajet_sdk.run(agent, tasks)        # agent(task, episode) -> reward

`ajet_sdk.aio` holds an async twin of each. Names are loaded when they are first used, so that importing this package
costs a few milliseconds; httpx is loaded by the first request.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajet_sdk import aio as aio
    from ajet_sdk import errors as errors
    from ajet_sdk.client import Client as Client
    from ajet_sdk.episodes import Episode as Episode
    from ajet_sdk.episodes import abort as abort
    from ajet_sdk.episodes import episode as episode
    from ajet_sdk.episodes import reward as reward
    from ajet_sdk.errors import AjetError as AjetError
    from ajet_sdk.errors import ProxyUnreachable as ProxyUnreachable
    from ajet_sdk.results import RunResult as RunResult
    from ajet_sdk.results import RunResults as RunResults
    from ajet_sdk.rollouts import run as run

__version__ = "0.1.0"
_HOME = {
    "AjetError": "errors",
    "Client": "client",
    "Episode": "episodes",
    "ProxyUnreachable": "errors",
    "RunResult": "results",
    "RunResults": "results",
    "abort": "episodes",
    "episode": "episodes",
    "reward": "episodes",
    "run": "rollouts",
}
__all__ = sorted([*_HOME, "aio", "errors"])


def __getattr__(name: str) -> Any:
    if name in ("aio", "errors"):
        return import_module(f"ajet_sdk.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ajet_sdk' has no attribute {name!r}")
    return getattr(import_module(f"ajet_sdk.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
