"""Teams: models that learn from the same episodes, and how many updates each of them has made since it joined.

Idea: an update is one policy version more. It is announced as soon as its weights serve, however seldom its trainer
saves and acknowledges. Who joins a team begins where its slowest is, and so does a model that begins anew.

Invariant: a model is in one team at most. The slowest of a team waits for nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Team = dict[str, int]
"""By model, how many updates it has made."""


def join(teams: list[Team], models: Collection[str]) -> None:
    """`models` learn from one episode: their teams are one from now on, in which the slowest of each are level."""
    apart = [team for team in teams if not team.keys().isdisjoint(models)]
    if len(models) < 2 or (apart and apart[0].keys() >= set(models)):
        return
    whole = dict.fromkeys(models, 0)
    for team in apart:
        teams.remove(team)
        least = min(team.values())
        whole |= {model: count - least for model, count in team.items()}
    teams.append(whole)


def moved(teams: Iterable[Team], model: str, before: int, after: int, *, anew: bool = False) -> None:
    """The version of `model` was `before` and is `after`. It is lower if a trainer goes back to a checkpoint, and 0 if
    it begins anew. Another run always begins `anew`."""
    for team in teams:
        if model in team:
            others = min(count for name, count in team.items() if name != model)
            team[model] = others if anew or after == 0 < before else team[model] + after - before


def slowest(teams: Sequence[Team], model: str) -> tuple[str, int]:
    """The slowest in the team of `model`, and how many updates it is behind `model`."""
    team = next((team for team in teams if model in team), {model: 0})
    least = min(team, key=lambda name: (team[name], name))
    return least, team[model] - team[least]
