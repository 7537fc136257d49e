"""Hosts of their own for a test (Linux, root), behind a router that can lose packets between any two of them.

``with Hosts("a", "b") as hosts: hosts.cut("a", "b")``. Each is a network namespace in a subnet of its own, so that what
one sends to another passes the router: there a way is lost without a word to either side, as in a network that fails,
and not as when a program ends, whose system still closes its connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.kit import namespace
from tests.kit.namespace import Namespace

CABLES = "ip link add name left type veth peer name right && ip rule add from 10.0.0.0/24 to 10.0.1.0/24 blackhole"
CLONE_NEWNET = 0x40000000


def lacking() -> str | None:
    """Why there can be no such hosts here, if there can be none."""
    needs = "a kernel with veth pairs and rules that drop packets"
    return namespace.lacking(("unshare", "nsenter", "ip"), CABLES, needs)


class Hosts:
    """One host for each of `names`; what runs on them must have ended when the context is left."""

    def __init__(self, *names: str) -> None:
        self._subnets = {name: f"10.99.{place}" for place, name in enumerate(names, 1)}
        self._up: dict[str, Namespace] = {}
        self._lost: set[str] = set()
        self._router = Namespace()
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            stack.enter_context(self._router)
            stack.callback(self._end)
            self._router.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
            for name in self._subnets:
                self.start(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, name: str) -> str:
        return f"{self._subnets[name]}.2"

    def inside(self, name: str) -> tuple[str, ...]:
        """The prefix of a command that runs on the host."""
        return self._up[name].inside

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """The calling thread, and the threads that it starts, are on the host."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(f"/proc/{self._up[name].pid}/ns/net")
            yield
        finally:
            _enter(f"/proc/self/fd/{before}")
            os.close(before)

    def cut(self, one: str, other: str, *, back: bool = True) -> None:
        """Has what `one` sends to the `other` be lost from now on, and what comes back, too."""
        self._rules("add", one, other, back)

    def mend(self, one: str, other: str, *, back: bool = True) -> None:
        """The end of such a cut."""
        self._rules("del", one, other, back)

    def start(self, name: str) -> None:
        """The host comes up, with nothing of what ran on it before."""
        subnet = self._subnets[name]
        host = self._up[name] = Namespace().__enter__()
        cable = ("name", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._router.run("ip", "link", "add", *cable)
        self._router.run("ip", "address", "add", f"{subnet}.1/24", "dev", f"to-{name}")
        self._router.run("ip", "link", "set", f"to-{name}", "up")
        host.run("ip", "address", "add", f"{subnet}.2/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "route", "add", "default", "via", f"{subnet}.1")
        if name in self._lost:
            self._lost.remove(name)
            self._router.run("ip", "route", "delete", "blackhole", f"{subnet}.0/25")

    def lose(self, name: str) -> None:
        """The host loses its power: what runs on it has no time for a word, and who asks it anything hears nothing."""
        self._router.run("ip", "route", "add", "blackhole", f"{self._subnets[name]}.0/25")
        self._router.run("ip", "link", "delete", f"to-{name}")
        self._lost.add(name)
        host = self._up.pop(name)
        network = Path(f"/proc/{host.pid}/ns/net").readlink()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(process.name) != host.pid and (process / "ns/net").readlink() == network:
                    os.kill(int(process.name), signal.SIGKILL)
        host.__exit__(None, None, None)

    def _end(self) -> None:
        for name in tuple(self._up):
            self.lose(name)

    def _rules(self, action: str, one: str, other: str, back: bool) -> None:
        for sender, receiver in ((one, other), (other, one))[: 1 + back]:
            ways = ("from", f"{self._subnets[sender]}.0/24", "to", f"{self._subnets[receiver]}.0/24")
            self._router.run("ip", "rule", action, *ways, "blackhole")


def _enter(network: str) -> None:
    """The calling thread is in the network namespace of this file from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(network, os.O_RDONLY)
    try:
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), network)
    finally:
        os.close(descriptor)
