"""``ajet-trainer serve``, put together: the host's file, the link to the daemon, the signals that end it."""

from __future__ import annotations

import platform
import re
import signal
from collections.abc import Callable, Mapping
from types import FrameType

from ajet_sdk.address import server
from ajet_sdk.settings import ConfigError
from ajet_trainer.config import SETTINGS, Config
from ajet_trainer.link import Link
from ajet_trainer.runs import allowed
from ajet_trainer.runs.supervisor import Supervisor, environment

ANSWER_S = 5.0
"""The time for an answer: trainers are not looked after meanwhile."""
LEAST_SECRET = 8
"""Characters. A shorter word may be in any line."""


def serve(proxy: str, allow: str, name: str | None, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Keeps runs until SIGTERM or SIGINT. Raises `ConfigError` for what cannot be used."""
    env, url = environment(environ), proxy.rstrip("/")
    if server(url) is None:
        raise ConfigError("--proxy must be http://HOST:PORT", param="proxy")
    config = Config(proxy_url=url, **SETTINGS.in_environment(env))
    link = Link.of(config, deadline_s=0.0, answer_s=ANSWER_S)
    called = name or re.sub(r"[^A-Za-z0-9._-]", "-", platform.node())[:64] or "host"
    keeper = Supervisor(
        allowed.read(allow), link, url, called, say=say, env=env, hidden=hidden_in(environ, config)
    )

    def end(number: int, frame: FrameType | None) -> None:
        say("ending: trainers save and end first")
        keeper.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    say(f"supervisor {called} keeps runs in {keeper.allowed.runs}")
    keeper.loop()


def hidden_in(environ: Mapping[str, str], config: Config) -> dict[str, str]:
    """Words that nobody sees from afar, with what is shown instead: our key, certificate, and what trainers have in
    variables such as HF_TOKEN."""
    named = (value for name, value in environ.items() if re.search(r"(KEY|TOKEN|SECRET|PASSWORD)$", name))
    words = {word for word in (config.key, *named, config.tls_cert) if len(word) >= LEAST_SECRET}
    return dict.fromkeys(sorted(words), "***")
