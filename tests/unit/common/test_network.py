"""Addresses and interfaces by which other hosts reach a process."""

from __future__ import annotations

import os

import pytest

from services.common.network import use_interface_of, with_reachable_host
from services.common.settings import ServiceSettings


def test_bound_to_every_address_the_one_towards_the_peer_is_told():
    settings = ServiceSettings(host="0.0.0.0", port=1, allow_insecure_bind=True)
    assert with_reachable_host(settings, "127.0.0.1:50051").advertise_host == "127.0.0.1"
    assert with_reachable_host(settings, "nowhere.invalid:1").advertise_host is None


@pytest.mark.parametrize("chosen", [{"host": "10.0.0.1"}, {"host": "0.0.0.0", "advertise_host": "node-7"}])
def test_what_the_settings_say_is_kept(chosen):
    settings = ServiceSettings(port=1, **chosen)
    assert with_reachable_host(settings, "127.0.0.1:50051") == settings


def test_gloo_meets_over_the_interface_of_the_address(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    use_interface_of("203.0.113.7")  # nobody's
    assert not os.environ
    use_interface_of("127.0.0.1")
    assert os.environ == {"GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "eth7"})
    use_interface_of("127.0.0.1")
    assert os.environ == {"GLOO_SOCKET_IFNAME": "eth7"}
