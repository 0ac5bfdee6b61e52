"""Under which address, and over which interface, other hosts reach this process. Knows no service.

Both are guessed only where nobody said it: a setting or a variable of the environment wins.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

from services.common.settings import ServiceSettings, SettingsT

_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def with_reachable_host(settings: SettingsT, peer: str) -> SettingsT:
    """Settings whose `advertise_host` others can use: bound to every address, this host is known by the one from which
    it reaches `peer` (host:port)."""
    assert isinstance(settings, ServiceSettings)
    if settings.advertise_host or not _unspecified(settings.host):
        return settings
    host = _address_towards(peer)
    return settings.model_copy(update={"advertise_host": host}) if host else settings


def use_interface_of(host: str) -> None:
    """Has gloo groups of this process and its children meet over the interface that has the address of `host`.

    gloo would take the one that this host's own name resolves to, which on many hosts is the loopback, where no other
    host can be met. Does nothing for an address that is not this host's, or when GLOO_SOCKET_IFNAME is set.
    """
    name = _interface_of(host)
    if name:
        os.environ.setdefault(_GLOO_VARIABLE, name)


def _unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _address_towards(peer: str) -> str | None:
    """Own IPv4 address on the way to a peer; nothing is sent."""
    host, _, port = peer.rpartition(":")
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.rpartition("/")[2], int(port)))
        return probe.getsockname()[0]
    return None


def _interface_of(host: str) -> str | None:
    """Interface of this host that has an IPv4 address; None when there is none."""
    try:
        wanted = socket.gethostbyname(host)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(found[20:24]) == wanted:
                    return name
    return None
