"""A small environment of OpenEnv, served by its own server: say the number behind the door, in two tries."""

from typing import Any

from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Doors(Environment[Say, Heard, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0

    def reset(self, seed: int | None = None, **_: Any) -> Heard:
        self.tries, self.number = 0, 7 if seed is None else seed
        return Heard(text=f"Which number is behind door {self.number}?", done=False, reward=0.0)

    def step(self, action: Say, **_: Any) -> Heard:
        self.tries += 1
        right = str(self.number) in action.message
        return Heard(text="Yes." if right else "Try again.", done=right or self.tries == 2, reward=float(right))

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


app = create_app(Doors, Say, Heard, env_name="doors", max_concurrent_envs=2)
