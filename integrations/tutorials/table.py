"""Count the episodes that were played and trained, with their mean reward, by lane, task, revision, client or agent.

    python integrations/tutorials/table.py revision

It reads the records of the daemon at AJET_PROXY_URL, as `ajet show --json` prints them. By agent it counts the rewards
of each agent, and else those of episodes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean

from ajet_sdk import Client

PLAYED = ("sealed", "ready", "leased", "trained")


def rows(what: str) -> Iterator[tuple[str, str, float]]:
    """Of each reward: whose it is, the state of its episode, and its value; oldest first."""
    with Client() as proxy:
        listed = proxy.ask("list_episodes", limit=1000).json()["episodes"]
        for episode in reversed(listed):
            if episode["state"] not in PLAYED:
                continue
            if what == "agent":
                record = proxy.ask("get_episode", id=episode["episode"]).json()
                yield from ((reward["agent"], episode["state"], reward["value"]) for reward in record["rewards"])
            else:
                yield str(episode.get(what)), episode["state"], episode["reward"]


if __name__ == "__main__":
    found: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for name, state, value in rows(sys.argv[1]):
        found[name].append((state, value))
    width = max(map(len, (*found, sys.argv[1])))
    print(f"{sys.argv[1]:{width}}  episodes  trained  mean reward")
    for name, items in found.items():
        trained = sum(state == "trained" for state, _ in items)
        print(f"{name:{width}}  {len(items):8}  {trained:7}  {fmean(value for _, value in items):11.3f}")
