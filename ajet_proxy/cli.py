"""``ajet-proxy``: the daemon and its tools.

Only this module reads argv. Everything heavy is imported after the arguments are parsed, so that `--help` answers at
once.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TextIO, TypeVar

import click

from ajet_proxy.settings import NO_KEY, SETTINGS, Config, flag, load, split_upstream
from ajet_sdk.bodies import KEY_PREFIX
from ajet_sdk.commands import text
from ajet_sdk.output import run_command
from ajet_sdk.settings import COMMAND_LINE, ConfigError

if TYPE_CHECKING:
    from ajet_proxy.core.trajectory.timeline import Policy
    from ajet_proxy.offline import By

if find_spec("msgspec") is None:
    sys.exit("ajet-proxy: there is no msgspec here: the daemon is installed by pip install '.[proxy]'")

F = TypeVar("F", bound=Callable[..., Any])
TTL_MAX = 100 * 365 * 86400.0


def config_options(*names: str) -> Callable[[F], F]:
    """Add a flag for each setting that may stand on the command line; only for those in `names`, if any are given."""

    def decorate(command: F) -> F:
        for found in reversed(SETTINGS.options.values()):
            if COMMAND_LINE in found.places and (not names or found.name in names):
                lists = found.kind is tuple
                shown = f" [{found.shown}]" if found.shown and not lists else ""
                command = click.option(
                    flag(found.name), found.name, multiple=lists, default=None, is_flag=found.kind is bool,
                    type=str if lists else found.kind, metavar=found.metavar, help=found.doc + shown,
                )(command)
        return click.option("--config", "file", metavar="FILE", help="TOML file with the settings of `serve`.")(command)

    return decorate


def tree_options(command: F) -> F:
    """Add the options of what prints samples or trees of them."""
    by = click.option("--by", type=click.Choice(["episode", "group"]), help="With --tree: whose samples share a tree, "
                      "those of an episode (without --by) or those of a task's group.")
    tree = click.option("--tree", is_flag=True, help="Write trees, in which what samples share is there once.")
    return tree(by(command))


def configured(file: str | None, flags: dict[str, Any], env: Mapping[str, str] = os.environ) -> Config:
    given = {name: value for name, value in flags.items() if value is not None and value is not False and value != ()}
    return load(file, env, given)


@click.group(
    no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="ajet", prog_name="ajet-proxy", message="%(prog)s %(version)s")
def cli() -> None:
    """Run and inspect the proxy between LLM agents and their engine."""


@cli.command()
@config_options()
def serve(file: str | None, **flags: Any) -> None:
    """Run the proxy until SIGTERM.

    Requests in flight finish before it ends. Every option is also a key of the TOML file and a variable: --group-size
    is group_size and AJET_GROUP_SIZE. Options override variables, and variables override the file.
    """
    config = configured(file, flags)
    from ajet_proxy import daemon as app

    def ready(url: str) -> None:
        click.echo(f"ajet-proxy ready on {url}")
        click.echo(f"page {url}/ajet/, data in {Path(config.data_dir).absolute()}", err=True)

    app.main(config, ready)


@cli.command()
@click.argument("calls", type=click.File("rb"))
@click.option("--policy", type=click.Choice(["strict", "repair", "off"]), default="strict",
              help="How calls become samples.")
@tree_options
@click.option("--upstream", metavar="URL", help="With --policy repair: an engine that knows the text of the tokens, "
              "for calls without same_text.")
def merge(calls: BinaryIO, policy: Policy, upstream: str | None, tree: bool, by: By | None) -> None:
    """Turn recorded calls into samples.

    CALLS is a file of JSON lines, or - for stdin. The samples go to stdout.
    """
    from ajet_proxy import offline
    from ajet_sdk.address import is_key
    from ajet_sdk.errors import BadRequest

    try:
        key = os.environ.get("AJET_UPSTREAM_KEY")
        if upstream is not None and key is not None and not is_key(key):
            raise ConfigError(NO_KEY)
        with nullcontext() if upstream is None else offline.engine_text(split_upstream(upstream)[1], key) as text:
            _write(offline.merge_lines(calls, policy, _by(tree, by), text))
    except BadRequest as error:
        raise click.UsageError(error.message) if error.param in ("policy", "tree") else error from error


@cli.command()
@click.argument("data_dir", type=click.Path(exists=True, file_okay=False))
@tree_options
def replay(data_dir: str, tree: bool, by: By | None) -> None:
    """Rebuild what was delivered, bit for bit.

    The samples of the journal in DATA_DIR go to stdout.
    """
    from ajet_proxy import offline

    _write(offline.replay_lines(data_dir, partial(_say_removed, "batches, whole or in part"), _by(tree, by)))


@cli.command()
@click.argument("data_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--as", "form", type=click.Choice(["samples", "sft", "preferences"]), default="samples",
              show_default=True, help="Samples as they were delivered, rows for fine-tuning, or preference pairs.")
@click.option("--format", "kind", type=click.Choice(["jsonl", "parquet"]), default="jsonl", show_default=True,
              help="JSON lines, or Parquet, which needs pyarrow.")
@click.option("--out", type=click.File("wb", lazy=True), default="-", metavar="FILE",
              help="Write to FILE instead of stdout.")
@click.option("--state", "states", multiple=True, type=click.Choice(["ready", "leased", "trained", "recorded"]),
              default=("ready", "leased", "trained"), show_default=True,
              help="Only episodes in this state. Repeatable.")
@click.option("--task", help="Only episodes of this task.")
@click.option("--min-reward", type=float, help="Only samples with this reward or a higher one.")
@tree_options
def export(
    data_dir: Path, form: str, kind: str, out: BinaryIO, states: tuple[str, ...], task: str | None,
    min_reward: float | None, tree: bool, by: By | None,
) -> None:
    """Write samples for other programs.

    It reads the live and archived episodes of DATA_DIR.
    """
    from ajet_proxy import export as exported

    if min_reward is not None and math.isnan(min_reward):
        raise click.UsageError("--min-reward must be a number")
    if tree and (form, kind) != ("samples", "jsonl"):
        raise click.UsageError("--tree writes samples as JSON lines: leave --as and --format out")
    removed = partial(_say_removed, "episodes in these states")
    found = exported.rows(data_dir, form, exported.Choice(states, task, min_reward), removed, _by(tree, by))
    if kind == "parquet":
        exported.write_parquet(found, out, form)
    else:
        exported.write_jsonl(found, out)


@cli.command()
@config_options()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def doctor(file: str | None, as_json: bool, **flags: Any) -> None:
    """Check the engines, disk, permissions and clock.

    For each fault it says what to do.
    """
    config = configured(file, flags)
    import asyncio

    from ajet_proxy.doctor import examine
    from ajet_sdk.findings import show

    show(asyncio.run(examine(config)), json=as_json)


@cli.command("issue-key")
@config_options("data_dir")
@click.option("--scope", type=click.Choice(["agent", "trainer", "operator", "judge", "admin"]), required=True,
              help="What the key may do.")
@click.option("--tenant", default="", callback=text, help="The tenant whose episodes an agent's key reaches.")
@click.option("--model", default="", metavar="NAME", callback=text, help="The only model that a trainer's key reaches.")
@click.option("--traffic", default="", metavar="LANE", callback=text, help="What opens with an agent's key is users' "
              "traffic of this lane, to be learned from, where a request has X-AJet-Traffic: 1.")
@click.option("--always", is_flag=True, help="With --traffic: without that header too.")
@click.option("--lane", "lanes", multiple=True, metavar="LANE", help="A lane that a judge's key reaches; "
              "repeatable.")
@click.option("--ttl", type=click.FloatRange(0, TTL_MAX, min_open=True), default=30 * 86400.0, show_default=True,
              help="Lifetime in seconds.")
def issue_key(
    file: str | None, scope: str, tenant: str, model: str, traffic: str, always: bool, lanes: tuple[str, ...],
    ttl: float, **flags: Any,
) -> None:
    """Print a signed key.

    The key is valid at the proxy that uses this data directory.
    """
    config = configured(file, flags)
    from ajet_proxy import daemon as app
    from ajet_proxy.io.http import keyring

    if math.isnan(ttl):
        raise click.UsageError("--ttl must be a number of seconds")
    if model and scope != "trainer":
        raise click.UsageError("--model is for a key of scope trainer")
    if (traffic and scope != "agent") or (always and not traffic):
        raise click.UsageError("--traffic is for a key of scope agent, and --always goes with it")
    if bool(lanes) != (scope == "judge"):
        raise click.UsageError("--lane is for a key of scope judge, which needs at least one")
    if any("/" in lane for lane in (traffic, *lanes)):
        raise click.UsageError("a lane has no '/'")
    if not keyring.used(Path(config.data_dir)):
        click.echo(f"ajet-proxy: no proxy has used {config.data_dir} yet: the key is valid at one that will; for the "
                   "proxy of another user or of systemd, give its --data-dir", err=True)
    click.echo(app.issue_key(config, scope, tenant, ttl, model, (traffic,) if traffic else lanes, always))


@cli.command("rotate-secret")
@config_options("data_dir")
@click.option("--drop-old", is_flag=True, help="Make all earlier keys void.")
def rotate_secret(file: str | None, drop_old: bool, **flags: Any) -> None:
    """Sign keys with a new secret.

    A running proxy takes it up within seconds. Earlier keys stay valid until they expire.
    """
    config = configured(file, flags)
    from ajet_proxy.io.http import keyring

    old = keyring.rotate(_used_data_dir(config), drop_old=drop_old)
    older = "an older one" if old == 1 else f"{old} older ones"
    still = f"keys that {older} signed are valid until they expire" if old else "earlier keys are void"
    click.echo(f"keys are signed with a new secret; {still}")


@cli.command()
@config_options("data_dir")
@click.option("--key-id", metavar="ID", help="The key's id, as in the audit log.")
@click.option("--key-file", type=click.File("r"), metavar="FILE", help="A file that holds the key; - is stdin.")
@click.option("--tenant", callback=text,
              help="Every key issued so far for this tenant; '' means every key without a tenant.")
@click.option("--episode", callback=text, help="Every key issued so far for this episode.")
def revoke(file: str | None, key_file: TextIO | None, **flags: Any) -> None:
    """Make keys void.

    A running proxy takes this up within seconds.
    """
    chosen = {"key": flags.pop("key_id"), "tenant": flags.pop("tenant"), "episode": flags.pop("episode")}
    config = configured(file, flags)
    from ajet_proxy.core.identity.keys import KEY_ID, key_id
    from ajet_proxy.io.http import keyring
    from ajet_proxy.io.runtime.clock import Clock

    given = [(kind, name) for kind, name in chosen.items() if name is not None]
    if key_file is not None:
        try:
            key = key_file.read().strip()
        except UnicodeDecodeError:
            key = ""
        if not key.startswith(KEY_PREFIX):
            raise click.UsageError(f"{key_file.name} holds no key that ajet-proxy issued")
        given.append(("key", key_id(key)))
    if len(given) != 1:
        raise click.UsageError("give one of --key-id, --key-file, --tenant and --episode")
    kind, name = given[0]
    if kind == "key" and not KEY_ID.fullmatch(name):
        raise click.UsageError("--key-id must be 16 hexadecimal digits, as `key` in audit.jsonl")
    keyring.revoke(_used_data_dir(config), kind, name, Clock().now())
    click.echo(f"revoked {kind} {name!r}")


@cli.command("install-service", context_settings={"ignore_unknown_options": True})
@click.option("--user", is_flag=True, help="Use the user's own systemd instead of the machine's.")
@click.option("--print", "only_print", is_flag=True, help="Print the unit and write nothing.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def install_service(user: bool, only_print: bool, arguments: tuple[str, ...]) -> None:
    """Write a hardened systemd unit.

    ARGUMENTS are the options of `serve`.
    """
    from ajet_proxy import systemd as service
    from ajet_sdk.systemd import install, out_of_reach

    given = serve.make_context("ajet-proxy serve", list(arguments)).params
    names = ("file", *(found.name for found in SETTINGS.options.values() if found.metavar == "FILE"))
    files = {name: given[name] for name in names if given[name]}
    if not all(map(os.path.isabs, files.values())):
        raise click.UsageError("a service has no working directory: give absolute paths of files")
    settings = service.environment_file(user=user, env=os.environ)
    try:
        config = configured(given.pop("file"), given, service.environment(settings))
    except ConfigError as error:
        raise ConfigError(f"{error} (the service has only the variables in {settings})") from error
    if config.data_dir != service.STATE_DIRECTORY:
        raise click.UsageError("the service keeps its data in systemd's state directory: leave out --data-dir, "
                               f"data_dir in the TOML file and AJET_DATA_DIR in {settings}")
    if any(mode.kind == "local" for mode in config.modes):
        raise click.UsageError("a service cannot intercept as local: that needs sudo, which its unit does not allow")
    text = service.unit(arguments, user=user, drain_s=config.drain_s, files=files)
    program = Path(sys.executable)
    folder = None if user else out_of_reach(program) or out_of_reach(program.resolve())
    if folder is not None:
        click.echo(f"ajet-proxy: the service's own user cannot enter {folder}: install ajet elsewhere", err=True)
    if only_print:
        click.echo(text, nl=False)
        return
    path, then = install(service.UNIT_NAME, text, user=user, env=os.environ)
    click.echo(f"wrote {path}\n{then}")


def _used_data_dir(config: Config) -> Path:
    """The data directory. It is refused if no proxy's keys are there: to change other keys would look like success."""
    from ajet_proxy.io.http import keyring

    if not keyring.used(Path(config.data_dir)):
        raise ConfigError(f"{config.data_dir} holds no proxy's keys: give the running one's --data-dir")
    return Path(config.data_dir)


def _say_removed(what: str, count: int) -> None:
    if count:
        click.echo(f"ajet-proxy: retention has removed {count} {what}", err=True)


def _by(tree: bool, by: By | None) -> By | None:
    """Whose samples share a tree; None without trees."""
    if by is not None and not tree:
        raise click.UsageError("--by says whose samples share a tree, and needs --tree")
    return (by or "episode") if tree else None


def _write(lines: Iterator[str]) -> None:
    for line in lines:
        click.echo(line)


def main() -> NoReturn:
    run_command(cli, "ajet-proxy", "the daemon's part is ajet[proxy], for Python 3.12 or newer", explain=_explain)


def _explain(error: Exception) -> str | None:
    """Words for an error that only this command can have; None for others."""
    line = None
    if isinstance(error, UnicodeDecodeError):
        line = f"the input is not UTF-8 text: {error}"
    elif isinstance(error, OSError):
        advice = ": run it as the user that runs the proxy, or as root" if isinstance(error, PermissionError) else ""
        line = f"{error.strerror or error}" + (f": {error.filename}{advice}" if error.filename else "")
    return line and f"ajet-proxy: {line}"


if __name__ == "__main__":
    main()
