"""Several nodes on one machine, each a network namespace with an SSH server, and a router between them.

    this machine  gw0 10.77.0.1 --- router --- data0 10.77.1.2 in node a, 10.77.2.2 in node b, ...

The links carry packets of 9,000 bytes. Every node has a docker0 with one address, as on real machines. Each pytest
worker has a separate network: 10.77 for the first worker, 10.78 for the second.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from real_parts import need
from sshd import PATH, Sshd

NAMES = "abc"


def ip(*words: str) -> None:
    """Run `ip` and wait for it."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (words, done.stderr)


def permitted() -> bool:
    """Return whether this process may create network namespaces and links between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"gwp{os.getpid()}"
    tries = [["netns", "add", name], ["link", "add", "gwp0", "netns", name, "type", "veth", "peer", "name", name]]
    done = [subprocess.run(["ip", *words], capture_output=True, timeout=300, check=False).returncode for words in tries]
    subprocess.run(["ip", "link", "del", name], capture_output=True, timeout=300, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=300, check=False)
    return done == [0, 0]


@dataclass
class Nodes:
    """The namespaces, their servers, and an ssh_config that lists them all."""

    folder: Path
    servers: dict[str, Sshd] = field(default_factory=dict)
    tag: str = field(default_factory=lambda: f"gw{os.getpid() % 100_000}")
    net: str = f"10.{77 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[2:])}"

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    def space(self, node: str) -> str:
        return f"{self.tag}{node}"

    def address(self, node: str) -> str:
        return f"{self.net}.{NAMES.index(node) + 1}.2"

    def start(self) -> Nodes:
        need("network namespaces (root, iproute2)", permitted())
        router = self.space("r")
        ip("netns", "add", router)
        self.inside("r", ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        ip("link", "add", f"{self.tag}0", "type", "veth", "peer", "name", "up0", "netns", router)
        ip("addr", "add", f"{self.net}.0.1/24", "dev", f"{self.tag}0")
        ip("link", "set", f"{self.tag}0", "up")
        ip("-n", router, "addr", "add", f"{self.net}.0.2/24", "dev", "up0")
        ip("-n", router, "link", "set", "up0", "up")
        ip("route", "add", f"{self.net}.0.0/16", "via", f"{self.net}.0.2")
        for node in NAMES:
            self._add(node)
        self.config.write_text("".join(self._known(node, node) for node in NAMES) + self._known("b2", "b"))
        return self

    def _add(self, node: str) -> None:
        space, router, port = self.space(node), self.space("r"), f"port{node}"
        gate = self.address(node)[:-1] + "1"
        ip("netns", "add", space)
        ip("-n", space, "link", "set", "lo", "up")
        ip("link", "add", "data0", "netns", space, "mtu", "9000", "type", "veth", "peer", "name", port, "netns", router)
        ip("-n", router, "link", "set", port, "mtu", "9000", "up")
        ip("-n", router, "addr", "add", f"{gate}/24", "dev", port)
        ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "data0")
        ip("-n", space, "link", "set", "data0", "up")
        ip("-n", space, "route", "add", "default", "via", gate)
        ip("-n", space, "link", "add", "docker0", "type", "veth", "peer", "name", "vethdock")
        ip("-n", space, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        for name in ("docker0", "vethdock"):
            ip("-n", space, "link", "set", name, "up")
        self.serve(node)

    def serve(self, node: str, variables: str = "") -> None:
        """Start a node's server, with environment variables for its logins."""
        if node in self.servers:
            self.servers[node].stop()
        server = self.servers[node] = Sshd(
            self.folder / node,
            more=f"ListenAddress {self.address(node)}",
            path=f"{self.folder / node / 'bin'}:{Path(sys.executable).parent}:{PATH}",
            variables=variables,
            before=("ip", "netns", "exec", self.space(node)),
            port=2200,
            host=self.address(node),
        )
        (self.folder / node / "bin").mkdir(parents=True, exist_ok=True)
        server.start()

    def _known(self, name: str, node: str) -> str:
        return (
            f"Host {name}\n  HostName {self.address(node)}\n  Port 2200\n  User {getpass.getuser()}\n"
            f"  IdentityFile {self.folder / node}/clientkey\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
        )

    def inside(self, node: str, argv: list[str]) -> None:
        """Run a command in a namespace."""
        ip("netns", "exec", self.space(node), *argv)

    def link(self, node: str, *words: str) -> None:
        """Change a link of a node or of the router (`r`)."""
        ip("-n", self.space(node), "link", "set", *words)

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()
        for node in (*NAMES, "r"):
            subprocess.run(["ip", "netns", "del", self.space(node)], capture_output=True, timeout=300, check=False)
        subprocess.run(["ip", "link", "del", f"{self.tag}0"], capture_output=True, timeout=300, check=False)
