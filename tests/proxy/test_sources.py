"""Where the configuration's values come from, and in which order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ajet_proxy.core.ledger.quotas import Quota
from ajet_proxy.settings import Config, ConfigError
from ajet_proxy.sources import default_data_dir, load

SECRET = "sixteen characters"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", 'group_size = 2\nidle_timeout = 5\nlisten = "127.0.0.1:1"\nupstream = ["http://a"]')
    config = load(file, {"AJET_GROUP_SIZE": "3", "AJET_LISTEN": "127.0.0.1:2"}, {"listen": "127.0.0.1:3"})
    assert (config.listen, config.group_size, config.idle_timeout) == ("127.0.0.1:3", 3, 5.0)
    assert config.upstream == ("http://a",)
    assert config.gate_hold_s == Config().gate_hold_s


@pytest.mark.parametrize(
    ("text", "env", "hint"),
    [
        ("group_sise = 2", {}, "did you mean 'group_size'"),
        ("", {"AJET_GROUP_SISE": "2"}, "did you mean 'AJET_GROUP_SIZE'"),
        ('admin_secret = "x"', {}, "did you mean 'admin_secret_file'"),
        ("zzz = 1", {}, "known are upstream"),
        ("[serve]\ngroup_size = 2", {}, "settings stand in no table"),
        ("", {"AJET_PROXY": "http://a"}, "did you mean 'AJET_PROXY_URL'"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, text: str, env: dict[str, str], hint: str) -> None:
    with pytest.raises(ConfigError, match="unknown") as caught:
        load(write(tmp_path / "c.toml", text), env, {})
    assert hint in str(caught.value)


def test_quotas_stand_in_the_file_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", '[tenants.a]\nepisodes = 2\n[tenants."*"]\nbytes = 9\n')
    assert load(file, {}, {}).tenants == (("a", Quota(episodes=2)), ("*", Quota(bytes=9)))
    with pytest.raises(ConfigError, match="tenants of 'a' has an unknown key 'episode'; did you mean 'episodes'"):
        load(write(tmp_path / "d.toml", "[tenants.a]\nepisode = 2"), {}, {})
    with pytest.raises(ConfigError, match="AJET_TENANTS must be tables"):
        load(None, {"AJET_TENANTS": "a"}, {})


def test_variables_of_the_agent_side_are_left_alone() -> None:
    load(None, {"AJET_PROXY_URL": "x", "AJET_EPISODE": "y", "AJET_TRAINER_X": "z", "PATH": "/"}, {})


def test_the_admin_secret_may_stand_in_a_file_but_not_in_toml_or_flags(tmp_path: Path) -> None:
    config = load(None, {}, {"admin_secret_file": write(tmp_path / "s", SECRET + "\n")})
    assert config.admin_secret == SECRET
    assert not [f.name for f in dataclasses.fields(Config) if f.metadata["flag"] and f.name == "admin_secret"]
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        load(None, {}, {"admin_secret_file": str(tmp_path / "b")})


def test_text_becomes_the_fields_type() -> None:
    env = {"AJET_INSECURE": "true", "AJET_UPSTREAM": "a=http://x/v1, http://y", "AJET_MAX_BODY": "10"}
    config = load(None, env, {})
    assert (config.insecure, config.max_body) == (True, 10)
    assert config.upstreams == {"a": ("http://x/v1",), "": ("http://y",)}
    for variable in ("AJET_INSECURE", "AJET_MAX_BODY"):
        with pytest.raises(ConfigError, match=variable):
            load(None, {variable: "perhaps"}, {})


@pytest.mark.parametrize(
    "text", ["group_size = 1.5", "group_size = true", "upstream = [1]", "listen = 3", "insecure = 2"]
)
def test_toml_values_of_another_type_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="must be"):
        load(write(tmp_path / "c.toml", text), {}, {})


def test_a_file_that_is_missing_or_no_toml_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(str(tmp_path / "none"), {}, {})
    with pytest.raises(ConfigError, match="not TOML"):
        load(write(tmp_path / "c.toml", "= ="), {}, {})


def test_the_data_directory_is_systemds_or_the_users() -> None:
    assert default_data_dir({"STATE_DIRECTORY": "/var/lib/ajet:/x"}) == "/var/lib/ajet"
    assert default_data_dir({"XDG_STATE_HOME": "/s"}) == "/s/ajet"
    assert default_data_dir({"HOME": "/h"}) == "/h/.local/state/ajet"


def test_a_tilde_in_a_path_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "s", SECRET)
    write(tmp_path / "c.toml", 'data_dir = "~/d"\nadmin_secret_file = "~/s"\nlisten = "127.0.0.1:1"')
    config = load("~/c.toml", {"AJET_TLS_CERT": "~/c.pem"}, {"tls_key": "~/k.pem", "public_url": "http://a/~b"})
    assert (config.data_dir, config.admin_secret) == (f"{tmp_path}/d", SECRET)
    assert (config.tls_cert, config.tls_key) == (f"{tmp_path}/c.pem", f"{tmp_path}/k.pem")
    assert config.public_url == "http://a/~b"
    assert load(None, {}, {"data_dir": "a~b"}).data_dir == "a~b"
