"""The daemon's settings: where they come from, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.core.ledger.quotas import Quota
from ajet_proxy.settings import (
    SETTINGS,
    Config,
    Mode,
    default_data_dir,
    load,
    split_address,
    split_mode,
    split_upstream,
)
from ajet_sdk.settings import COMMAND_LINE, ConfigError
from tests.kit.pages import table_of

SECRET = "sixteen_characters"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"listen": "8484"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:-1"}, "HOST:PORT"),
        ({"listen": ":80"}, "HOST:PORT"),
        ({"upstream": ("localhost:8000",)}, "upstream must be"),
        ({"upstream": ("m=ftp://x",)}, "upstream must be"),
        ({"upstream": ("http://x/?q=1",)}, "upstream must be"),
        ({"upstream": ("http://[x",)}, "upstream must be"),
        ({"upstream": ("http://x:99999",)}, "upstream must be"),
        ({"upstream": ("m=http://me:sesame@x",)}, "without a name and password"),
        ({"upstream": ("http://x y",)}, "upstream must be"),
        ({"upstream": ("m=http://x:1/v1/chat/completions",)}, "'m=http://x:1', not 'm=http://x:1/v1/chat/completions'"),
        ({"upstream": ("http://x/api/v1/messages/",)}, "without a route: 'http://x/api', not"),
        ({"upstream": ("m=http://localhost:8484/v1",)}, "the proxy's own address"),
        ({"upstream": ("http://[::1]:9",), "listen": "[::1]:9"}, "the proxy's own address"),
        ({"upstream": ("http://0.0.0.0:8484",)}, "the proxy's own address"),
        ({"upstream": ("http://[::ffff:127.0.0.1]:8484",)}, "the proxy's own address"),
        ({"upstream": ("http://127.0.0.1:1",), "intercept": ("socks5@localhost:1",)}, "the proxy's own address"),
        ({"upstream": ("https://x/v1",), "public_url": "https://x/"}, "the proxy's own address"),
        ({"public_url": "agents.example.org"}, "public_url must be"),
        ({"public_url": "http://[::1"}, "public_url must be"),
        ({"gate_mode": "stop"}, "drain, pause"),
        ({"merge_policy": "loose"}, "strict, repair, off"),
        ({"idle_timeout": 0.0}, "above 0"),
        ({"read_timeout": -1.0}, "--read-timeout must be at least 0, not -1.0"),
        ({"workers": 65}, "at most 64"),
        ({"tls_cert": "x"}, "belong together"),
        ({"tls_client_ca": "x"}, "tls_client_ca needs tls_cert"),
        ({"allow_route": ("v2",)}, "begin with '/'"),
        ({"allow_route": ("/pause/",)}, "/pause/ changes the engine"),
        ({"listen": "0.0.0.0:1"}, "needs an admin secret"),
        ({"listen": "[::]:1"}, "needs an admin secret"),
        ({"listen": "example.org:1"}, "needs an admin secret"),
        ({"intercept": ("0.0.0.0:1",)}, "open proxy"),
        ({"intercept": ("1",)}, "intercept must be HOST:PORT"),
        ({"intercept": ("local",)}, "or local:PROGRAM, not 'local'"),
        *(({"intercept": (text,)}, f"or local:PROGRAM, not '{text}'") for text in ("local:", "local:a,", "local:a, !")),
        ({"intercept": ("transparent:8486",)}, "transparent@HOST:PORT or local:PROGRAM"),
        ({"intercept": ("regular",)}, "intercept must be HOST:PORT, socks5@HOST:PORT"),
        ({"intercept_host": ("https://api.openai.com",)}, "a host's name alone, such as api.openai.com, not 'https://"),
        ({"intercept_host": ("*.openai.com",)}, "a host's name alone"),
        ({"intercept_host": ("api.openai.com:443",)}, "a host's name alone"),
        ({"intercept": ("socks4@127.0.0.1:1",)}, "socks5@HOST:PORT, transparent@HOST:PORT or local:PROGRAM"),
        ({"intercept": ("127.0.0.1:1", "socks5@127.0.0.1:1")}, "an address of its own"),
        ({"intercept": ("local:a", "local:b")}, "separate its programs by commas"),
    ],
)
def test_what_cannot_be_used_is_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, {}, flags)


def test_off_loopback_needs_a_secret_and_tls_or_a_word_about_it() -> None:
    env = {"AJET_ADMIN_SECRET": SECRET}
    with pytest.raises(ConfigError, match="tls-cert"):
        load(None, env, {"listen": "0.0.0.0:1"})
    for extra in ({"insecure": True}, {"trusted_front": True}, {"tls_cert": "c", "tls_key": "k"}):
        assert load(None, env, {"listen": "0.0.0.0:1", **extra}).admin_secret == SECRET
    with pytest.raises(ConfigError, match="at least 16"):
        load(None, {"AJET_ADMIN_SECRET": "short"}, {})


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        split_upstream("http://me:sesame@x")
    assert "sesame" not in str(caught.value)


def test_addresses_and_upstreams() -> None:
    assert split_address("[::1]:80", "x") == ("::1", 80)
    assert split_upstream("http://h:1/v1/") == ("", "http://h:1/v1/")
    assert split_upstream("http://h/models") == ("", "http://h/models")
    assert split_upstream("http://h/a=b") == ("", "http://h/a=b")
    assert split_upstream("org/m-1=https://h/api/v1") == ("org/m-1", "https://h/api/v1")
    config = load(None, {"AJET_UPSTREAM": "a=http://x/v1, http://y"}, {})
    assert config.upstreams == {"a": ("http://x/v1",), "": ("http://y",)}


def test_secrets_stand_on_no_command_line() -> None:
    for name in ("admin_secret", "upstream_key"):
        assert SETTINGS.options[name].secret and COMMAND_LINE not in SETTINGS.options[name].places


def test_every_setting_is_documented() -> None:
    shown = table_of(SETTINGS)
    for f in dataclasses.fields(Config):
        assert f"| `{f.name}` |" in shown
    assert all(found.doc.endswith(".") for found in SETTINGS.options.values())


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("127.0.0.1:8485", Mode("regular", ("127.0.0.1", 8485))),
        ("[::1]:1", Mode("regular", ("::1", 1))),
        ("regular@localhost:1", Mode("regular", ("localhost", 1))),
        ("socks5@127.0.0.1:1080", Mode("socks5", ("127.0.0.1", 1080))),
        ("transparent@0.0.0.0:2", Mode("transparent", ("0.0.0.0", 2))),
        ("local:node,!42", Mode("local", None, "node,!42")),
    ],
)
def test_modes_of_interception(text: str, mode: Mode) -> None:
    assert split_mode(text) == mode


@pytest.mark.parametrize("host", ["api.openai.com.", "my_host", "API.x", "10.0.0.1", "::1", "2001:db8::7", "localhost"])
def test_hosts_that_can_be_listed(host: str) -> None:
    assert load(None, {}, {"intercept_host": (host,)}).intercept_host == (host,)


def test_interception_off_loopback_needs_keys() -> None:
    exposed = load(None, {"AJET_ADMIN_SECRET": SECRET}, {"intercept": ("127.0.0.1:1", "0.0.0.0:2"), "insecure": True})
    assert exposed.intercept_needs_key
    assert not load(None, {"AJET_ADMIN_SECRET": SECRET}, {"intercept": ("[::1]:1", "local:a")}).intercept_needs_key
    with pytest.raises(ConfigError, match="keys over plain HTTP"):
        load(None, {"AJET_ADMIN_SECRET": SECRET}, {"intercept": ("0.0.0.0:1",)})


@pytest.mark.parametrize(("name", "value", "message"), [
    ("platform", "darwin", "as Linux lets them"), ("version_info", (3, 11, 9), "need Python 3.12"),
])  # fmt: skip
def test_worker_processes_need_what_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str
) -> None:
    assert load(None, {}, {"workers": 2}).workers == 2
    monkeypatch.setattr(f"ajet_proxy.settings.sys.{name}", value)
    assert load(None, {}, {"workers": 1}).workers == 1
    with pytest.raises(ConfigError, match=message):
        load(None, {}, {"workers": 2})


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", 'group_size = 2\nidle_timeout = 5\nlisten = "127.0.0.1:1"\nupstream = ["http://a"]')
    config = load(file, {"AJET_GROUP_SIZE": "3", "AJET_LISTEN": "127.0.0.1:2"}, {"listen": "127.0.0.1:3"})
    assert (config.listen, config.group_size, config.idle_timeout) == ("127.0.0.1:3", 3, 5.0)
    assert config.upstream == ("http://a",)
    assert config.gate_hold_s == Config().gate_hold_s


def test_quotas_stand_in_the_file_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", '[tenants.a]\nepisodes = 2\n[tenants."*"]\nbytes = 9\n')
    assert load(file, {}, {}).tenants == (("a", Quota(episodes=2)), ("*", Quota(bytes=9)))
    with pytest.raises(ConfigError, match="tenants of 'a': unknown key 'episode'; did you mean 'episodes'"):
        load(write(tmp_path / "d.toml", "[tenants.a]\nepisode = 2"), {}, {})
    with pytest.raises(ConfigError, match="tenants must be tables"):
        load(write(tmp_path / "d.toml", "tenants = 1"), {}, {})
    with pytest.raises(ConfigError, match="AJET_TENANTS stands in the TOML file alone"):
        load(None, {"AJET_TENANTS": "a"}, {})


def test_variables_of_the_agent_side_are_left_alone() -> None:
    load(None, {"AJET_PROXY_URL": "x", "AJET_EPISODE": "y", "AJET_TRAINER_X": "z", "PATH": "/"}, {})


def test_the_data_directory_is_systemds_or_the_users() -> None:
    assert default_data_dir({"STATE_DIRECTORY": "/var/lib/ajet:/x"}) == "/var/lib/ajet"
    assert default_data_dir({"XDG_STATE_HOME": "/s"}) == "/s/ajet"
    assert default_data_dir({"HOME": "/h"}) == "/h/.local/state/ajet"
    assert load(None, {"HOME": "/h"}, {}).data_dir == "/h/.local/state/ajet"


@pytest.mark.parametrize(("env", "flags"), [({}, {"data_dir": ""}), ({"AJET_DATA_DIR": ""}, {})])
def test_an_unset_variable_is_no_data_directory(env: dict[str, str], flags: dict[str, str]) -> None:
    """Of a script that says ``--data-dir "$DATA"``: another daemon's journal may be in the default one."""
    with pytest.raises(ConfigError, match="data_dir is empty"):
        load(None, env, flags)
