"""Which upstreams would be the proxy itself, however they are spelled."""

from __future__ import annotations

import socket

import pytest

from ajet_proxy.own_address import Address, leads_here


def spelled(*hosts: str) -> list[str]:
    return [f"http://{host}:8484" for host in hosts]


@pytest.mark.parametrize(("listening", "url"), [
    *((("127.0.0.1", 8484), url) for url in spelled(
        "127.0.0.1", "localhost", "LOCALHOST", "0.0.0.0", "127.1", "[::ffff:127.0.0.1]", "2130706433",
    )),
    *((("0.0.0.0", 8484), url) for url in spelled("127.0.0.1", "127.0.0.5", "localhost", "0.0.0.0")),
    *((("::", 8484), url) for url in spelled("[::1]", "[::]")),
    *((("::1", 8484), url) for url in spelled("[::1]", "[::]", "[0:0:0:0:0:0:0:1]")),
    (("localhost", 8484), "http://127.0.0.1:8484/v1"),
    (("127.0.0.1", 80), "http://localhost"), (("127.0.0.1", 443), "https://localhost/v1/"),
])  # fmt: skip
def test_each_spelling_of_an_own_address_leads_here(listening: Address, url: str) -> None:
    assert leads_here(url, [("10.0.0.1", 1), listening])


@pytest.mark.parametrize(("listening", "url"), [
    (("127.0.0.1", 8484), "http://127.0.0.1:8000"), (("127.0.0.1", 8484), "http://127.0.0.2:8484"),
    (("127.0.0.1", 8484), "http://[::1]:8484"), (("127.0.0.1", 8484), "http://192.0.2.1:8484"),
    (("0.0.0.0", 8484), "http://192.0.2.1:8484"), (("::", 8484), "http://[2001:db8::1]:8484"),
    (("0.0.0.0", 8484), "http://[::1]:8484"), (("0.0.0.0", 8484), "http://[::]:8484"),
    (("::", 8484), "http://127.0.0.1:8484"), (("::", 8484), "http://[::ffff:127.0.0.1]:8484"),
    (("192.0.2.1", 8484), "http://0.0.0.0:8484"), (("0.0.0.0", 8484), "http://nobody.invalid:8484"),
    (("127.0.0.1", 80), "no address"), (("127.0.0.1", 80), "https://127.0.0.1"),
])  # fmt: skip
def test_other_addresses_do_not(listening: Address, url: str) -> None:
    assert not leads_here(url, [listening])


def test_the_address_of_this_machine_leads_to_who_listens_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, 1, 6, "", ("127.3.2.1" if host == "gpu-7" else host, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert leads_here("http://gpu-7:8484", [("0.0.0.0", 8484)])
    assert not leads_here("http://gpu-7:8484", [("127.0.0.1", 8484)])


@pytest.mark.parametrize(("ip", "ours"), [
    ("127.0.0.1", True), ("127.3.2.1", True), ("::1", True),
    ("203.0.113.1", False), ("255.255.255.255", False), ("2001:db8::1", False),
])  # fmt: skip
def test_an_address_is_this_machines_by_where_the_system_would_connect_from(
    ip: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``net.ipv4.ip_nonlocal_bind`` a socket can be bound to any address, as here."""
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
    own, url = ("::", f"http://[{ip}]:8484") if ":" in ip else ("0.0.0.0", f"http://{ip}:8484")
    assert leads_here(url, [(own, 8484)]) == ours


def test_an_address_of_another_interface_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(socket.socket):
        def connect(self, where: object) -> None:
            self.where = where

        def getsockname(self) -> object:
            return self.where if self.where[0] == "203.0.113.7" else ("203.0.113.7", 40000)

    monkeypatch.setattr(socket, "socket", Probe)
    assert leads_here("http://203.0.113.7:8484", [("0.0.0.0", 8484)])
    assert not leads_here("http://203.0.113.8:8484", [("0.0.0.0", 8484)])


def test_no_name_is_looked_up_for_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert not leads_here("http://engine.example.org:8000", [("127.0.0.1", 8484)])


@pytest.mark.parametrize(("url", "own"), [
    ("https://gpu.example.org/ajet/v1/", True), ("https://GPU.example.org/ajet", True),
    ("https://gpu.example.org:443/ajet", True), ("https://x@gpu.example.org:/ajet/", True),
    ("http://gpu.example.org:443/ajet/v1", True), ("http://gpu.example.org/ajet", False),
    ("https://gpu.example.org/vllm", False), ("https://gpu.example.org", False),
    ("https://gpu.example.org/AJET", False), ("https://gpu.example.org:8443/ajet", False), ("http://[::1", False),
])  # fmt: skip
def test_the_address_that_agents_know_is_an_own_one_and_its_neighbours_are_not(url: str, own: bool) -> None:
    assert leads_here(url, [], "https://gpu.example.org/ajet") == own


def test_an_address_that_agents_cannot_know_is_none() -> None:
    """It is refused elsewhere, with a line of its own."""
    assert not leads_here("http://[::1", [], "http://[::1")
