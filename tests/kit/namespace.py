"""A network of its own for a test (Linux, root): in it, programs see no other machine, and firewall rules harm nobody.

``with Namespace() as net: net.run("ip", "address")``. `Namespace.inside` is the prefix of a command that runs in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CABLE = """
import fcntl, os, select, struct, sys
ends = []
for pid, name in zip(sys.argv[1::2], sys.argv[2::2]):
    os.setns(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY), os.CLONE_NEWNET)
    ends.append(os.open("/dev/net/tun", os.O_RDWR))
    fcntl.ioctl(ends[-1], 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1001))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
print("ready", flush=True)
while True:
    for end in select.select(ends, [], [])[0]:
        try:
            os.write(ends[1 - ends.index(end)], os.read(end, 65536))
        except OSError:
            pass  # the other end is not up, and loses the packet
"""
TOOLS = ("unshare", "nsenter", "ip", "nft")
RULES = """set -e
test -w /dev/net/tun
ip link set lo up
nft 'add table inet t; add chain inet t c { type nat hook output priority 0; }'
"""


def lacking(
    tools: Sequence[str] = TOOLS, script: str = RULES, needs: str = "/dev/net/tun, and network namespaces with rules",
) -> str | None:
    """Why there can be no namespace here in which `script` succeeds, if there can be none."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, to make network namespaces"
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--mount", "sh", "-c", script], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"needs {needs}"


class Namespace:
    """Lives as long as its context; what runs in it must have ended by then."""

    def __init__(self, outer: Namespace | None = None) -> None:
        self._outer = outer
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Namespace:
        around = self._outer.inside if self._outer is not None else ()
        before = Path("/proc/self/ns/net").readlink()
        self._keeper = subprocess.Popen([*around, "unshare", "--net", "--mount", "sleep", "infinity"])
        while Path(f"/proc/{self.pid}/comm").read_text() != "sleep\n":
            assert self._keeper.poll() is None
            time.sleep(0.01)
        assert Path(f"/proc/{self.pid}/ns/net").readlink() != before
        self.run("ip", "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._keeper is not None
        self._keeper.kill()
        self._keeper.wait()

    @property
    def pid(self) -> int:
        assert self._keeper is not None
        return self._keeper.pid

    @property
    def inside(self) -> tuple[str, ...]:
        return ("nsenter", "--target", str(self.pid), "--net", "--mount", "--")

    def run(self, *command: str, **more: str) -> str:
        """The output of `command`, on both; it must succeed. `more` is added to its environment."""
        done = subprocess.run(
            [*self.inside, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
            check=False, env=os.environ | more,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    @contextmanager
    def cable(self, name: str, address: str, other: Namespace, other_name: str, other_address: str) -> Iterator[None]:
        """A link between two namespaces: an interface in each, with its address."""
        ends = (str(self.pid), name, str(other.pid), other_name)
        carrier = subprocess.Popen([sys.executable, "-c", CABLE, *ends], stdout=subprocess.PIPE)
        try:
            assert carrier.stdout is not None
            assert carrier.stdout.readline() == b"ready\n"
            for net, interface, own in ((self, name, address), (other, other_name, other_address)):
                net.run("ip", "address", "add", own, "dev", interface)
                net.run("ip", "link", "set", interface, "up")
            yield
        finally:
            carrier.kill()
            carrier.communicate()

    def hosts(self, folder: Path, **addresses: str) -> None:
        """Names that are known in here."""
        known = folder / f"hosts-{self.pid}"
        names = "".join(f"{address} {name.replace('_', '.')}\n" for name, address in addresses.items())
        known.write_text("127.0.0.1 localhost\n" + names)
        self.run("mount", "--bind", str(known), "/etc/hosts")
