"""Hosts as network namespaces on one switch (a Linux bridge), for faults of the network between real processes.

This process sits on the switch as well, so it sees every host whatever is cut between them. Needs root and `ip`;
`Network` raises NotPermitted with the reason where that is refused (tests skip, see `two_hosts`).

Invariants: names carry this process's id, so that two test processes never meet; every command has a deadline; leaving
the context ends what still runs inside and deletes everything, also after a failure; what a killed process left behind
is removed by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_PREFIX = "tetrarch"
_COMMAND_SECONDS = 10.0
_END_SECONDS = 5.0
_counter = itertools.count()


class NotPermitted(RuntimeError):
    """Namespaces cannot be made here; the message says why."""


class Network:
    """Hosts on one switch.

    Args:
        hosts: their names. `address` tells where they are.
    """

    def __init__(self, hosts: Sequence[str] = ("a", "b")) -> None:
        self.hosts = tuple(hosts)
        self._number = next(_counter)
        self._short = f"t{os.getpid():x}-{self._number:x}"  # names of interfaces have 15 characters at most
        self._subnet = ""

    def __enter__(self) -> Network:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Makes everything. Raises NotPermitted."""
        reason = _refusal()
        if reason:
            raise NotPermitted(reason)
        _sweep()
        self._subnet = _free_subnet()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    # -- where things are

    @property
    def own_address(self) -> str:
        """This process on the switch."""
        return f"{self._subnet}.1"

    def address(self, host: str) -> str:
        """IPv4 address of a host."""
        return f"{self._subnet}.{self.hosts.index(host) + 2}"

    def namespace(self, host: str) -> str:
        """Name of its namespace."""
        return f"{_PREFIX}-{os.getpid()}-{self._number}-{host}"

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Command line that runs a program on a host. The program keeps the pid of what is started."""
        return ["ip", "netns", "exec", self.namespace(host), *argv]

    # -- faults

    def partition(self, *hosts: str) -> None:
        """The named hosts (all when none is named) do not hear each other any more: frames between them vanish at the
        switch, links stay up, and neither side is told. Everyone still hears this process, and hosts not named."""
        for host in hosts or self.hosts:
            _ip("link", "set", "dev", self._port(host), "type", "bridge_slave", "isolated", "on")

    def heal(self) -> None:
        """Ends every partition."""
        for host in self.hosts:
            _ip("link", "set", "dev", self._port(host), "type", "bridge_slave", "isolated", "off")

    def limit(self, host: str, bytes_per_second: int) -> None:
        """Slows everything that a host is sent and sends down to a rate."""
        rate = f"{bytes_per_second * 8}bit"
        shape = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "200ms")
        _run("tc", "qdisc", "replace", "dev", self._port(host), *shape)
        _ip("netns", "exec", self.namespace(host), "tc", "qdisc", "replace", "dev", "eth0", *shape)

    def unlimit(self, host: str) -> None:
        """Full speed again."""
        _run("tc", "qdisc", "del", "dev", self._port(host), "root")
        _ip("netns", "exec", self.namespace(host), "tc", "qdisc", "del", "dev", "eth0", "root")

    # -- making and removing

    def _port(self, host: str) -> str:
        return f"{self._short}p{self.hosts.index(host)}"

    def _build(self) -> None:
        bridge = f"{self._short}b"
        _ip("link", "add", bridge, "type", "bridge", "forward_delay", "0", "stp_state", "0")
        _ip("addr", "add", f"{self.own_address}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in self.hosts:
            name, port = self.namespace(host), self._port(host)
            _ip("netns", "add", name)
            inside = ("peer", "name", "eth0", "netns", name, "address", self._mac(host))
            _ip("link", "add", port, "type", "veth", *inside)
            _ip("link", "set", port, "master", bridge)
            _ip("link", "set", port, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        for host, other in itertools.permutations(self.hosts, 2):
            # Known for good, as behind a router: a partition is then silence, not "host unreachable".
            entry = ("neigh", "replace", self.address(other), "lladdr", self._mac(other), "dev", "eth0")
            _ip("-n", self.namespace(host), *entry, "nud", "permanent")

    def _mac(self, host: str) -> str:
        pid = os.getpid()
        return f"02:54:{pid >> 16 & 255:02x}:{pid >> 8 & 255:02x}:{pid & 255:02x}:{self.hosts.index(host) + 2:02x}"

    def close(self) -> None:
        """Ends what runs inside and removes everything. Safe to call twice."""
        for host in self.hosts:
            _remove_namespace(self.namespace(host))
        for link in (*(self._port(host) for host in self.hosts), f"{self._short}b"):
            if Path(f"/sys/class/net/{link}").exists():
                with contextlib.suppress(RuntimeError):  # a veth goes with its peer's namespace, at any moment
                    _ip("link", "del", link)


@pytest.fixture
def two_hosts() -> Iterator[Network]:
    """Hosts "a" and "b"; the test is skipped where namespaces cannot be made."""
    network = Network()
    try:
        network.open()
    except NotPermitted as error:
        pytest.skip(str(error))
    yield network
    network.close()


def _refusal() -> str:
    """Why no namespace can be made here; empty when it can."""
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


def _sweep() -> None:
    """Removes what processes that are gone have left."""
    for entry in _run("ip", "netns", "list").splitlines():
        match = re.match(rf"({_PREFIX}-(\d+)-\S+)", entry)
        if match and not Path(f"/proc/{match[2]}").exists():
            _remove_namespace(match[1])
    for path in Path("/sys/class/net").iterdir():
        # A bridge outlives its ports.
        match = re.fullmatch(r"t([0-9a-f]+)-[0-9a-f]+b", path.name)
        if match and not Path(f"/proc/{int(match[1], 16)}").exists() and (path / "bridge").exists():
            with contextlib.suppress(RuntimeError):
                _ip("link", "del", path.name)


def _remove_namespace(name: str) -> None:
    if not Path(f"/run/netns/{name}").exists():
        return
    deadline = time.monotonic() + _END_SECONDS
    while pids := [int(pid) for pid in _run("ip", "netns", "pids", name).split()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    _ip("netns", "del", name)


def _free_subnet() -> str:
    """First three numbers of a /24 in the range for benchmarks (RFC 2544) that no interface here uses."""
    links = json.loads(_run("ip", "-j", "-4", "addr", "show"))
    used = {address["local"].rpartition(".")[0] for link in links for address in link.get("addr_info", ())}
    for offset in range(512):
        number = (os.getpid() + offset) % 512
        subnet = f"198.{18 + number // 256}.{number % 256}"
        if subnet not in used:
            return subnet
    raise NotPermitted("all networks of 198.18.0.0/15 are in use")


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*argv: str) -> str:
    """Output of a command. Raises RuntimeError with its complaint."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(argv)} did not end within {_COMMAND_SECONDS:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
