"""Addresses that every HTTP library takes, and those that none should be asked about."""

from __future__ import annotations

import httpx
import pytest
import yarl
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.address import is_here, is_key, server


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:8484", ("127.0.0.1", 8484)), ("https://gpu.example.com/front", ("gpu.example.com", 443)),
        ("http://[::1]", ("::1", 80)), ("http://vllm_0:8000/v1", ("vllm_0", 8000)),
        ("http://Localhost.", ("localhost.", 80)),
        ("http://xn--strae-oqa.example:1", ("xn--strae-oqa.example", 1)), ("http://127.1:8", ("127.1", 8)),
    ],
)  # fmt: skip
def test_an_address_is_its_host_and_port(url: str, found: tuple[str, int]) -> None:
    assert server(url) == found


@pytest.mark.parametrize(
    "url",
    [
        "", "localhost:8484", "ftp://host", "http://", "http://a..b", "http://.a", "http://999.1.1.1", "HTTPS://a", "http://müller.example",
        f"http://{'a' * 64}", "http://-a", "http://a b", "http://a\t", "http://a:1\n", "http://a:0", "http://a:65536",
        "http://a:b", "http://[::1", "http://[::g]", "http://[::]a", "http://a?b=c", "http://a#b", "http://a\x7f", "http://a/\u2028",
    ],
)  # fmt: skip
def test_what_is_no_address_is_none(url: str) -> None:
    assert server(url) is None


@given(st.text(st.sampled_from("ab-_.:1950[]/%é\t@\\"), max_size=12))
def test_what_is_an_address_is_one_to_the_libraries_that_are_given_it(rest: str) -> None:
    url = f"http://{rest}"
    if server(url) is not None:
        httpx.Request("GET", url)
        assert yarl.URL(url).host


@pytest.mark.parametrize(("text", "usable"), [("sk-1_x.y~+/=", True), ("a b", False), ("a\n", False), ("ключ", False)])
def test_a_key_is_what_a_header_can_carry(text: str, usable: bool) -> None:
    assert is_key(text) == usable


@pytest.mark.parametrize(
    ("url", "here"),
    [("http://127.0.0.1:8484", True), ("http://localhost", True), ("http://[::1]:8", True), ("http://127.9.9.9", True),
     ("http://localhost.:1", True), ("http://[0:0:0:0:0:0:0:1]", True), ("http://127.0.0.1.example.com", False),
     ("http://gpu.example.com", False), ("http://10.0.0.1", False),
     ("http://[2001:db8::1]", False), ("no address", False)],
)  # fmt: skip
def test_a_loopback_address_is_here(url: str, here: bool) -> None:
    assert is_here(url) is here
