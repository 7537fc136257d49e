"""The control plane as a function: a request and the ledger in, an answer and the events that make it true out.

Nothing changes here. Each route of `ajet_sdk.routes.ROUTES` has one handler, of its name. Those of `HANDLERS` need
nothing but the ledger; some of them are also waited for (`ajet_proxy.io.control.routes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ajet_proxy.core.control import episodes, judging, playing, runs, training
from ajet_proxy.core.control.asked import Answer, Asked
from ajet_proxy.core.ledger import views


def status(asked: Asked) -> Answer:
    return Answer(lambda: views.status(asked.state, asked.presence.leads) | {
        "traffic": asked.commands.judging.status(asked.state.time(asked.at))
    })


def overview(asked: Asked) -> Answer:
    return Answer(lambda: views.overview(asked.state, asked.at))


HANDLERS: Mapping[str, Callable[[Asked], Answer]] = {
    handler.__name__: handler for handler in (
        episodes.open_episode, episodes.list_episodes, episodes.get_episode, episodes.reward, episodes.reward_answer,
        episodes.seal, episodes.abort, episodes.heartbeat, judging.feedback, judging.judge,
        training.lease, training.ack, training.nack, training.extend,
        training.flush, training.mix, training.set_mix, training.drop_mix, training.gate_close, training.gate_open,
        training.policy, training.trainers, training.evaluate, training.evaluation, playing.wanted, playing.play,
        playing.get_play, playing.end_play, playing.join, playing.clients, playing.beat, playing.leave, runs.list_runs,
        runs.get_run, runs.forget_run, runs.run_metrics, runs.run_log, runs.supervise, status, overview,
    )
}  # fmt: skip


def decide(asked: Asked) -> Answer:
    """The answer to `asked`."""
    return HANDLERS[asked.route.name](asked)
