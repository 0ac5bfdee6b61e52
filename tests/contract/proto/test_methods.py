"""Every method: documented, with a deadline, retried exactly when it may be, implemented by its tier."""

from __future__ import annotations

import importlib
import re

import pytest

from services.common.channel import SERVICES, open_sync_channel

from .conftest import PROTO, ROOT, read_service_configs

REASON = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*\b")
LONGEST_WAITS = {"LeasePrompts": 120, "TakeBatch": 120, "Evaluate": 3600, "CreateRun": 600, "WatchProgress": 86400}
"""Seconds a call of this name may take in good health."""


def test_every_method_is_documented_with_its_error_reasons(rpcs):
    assert len(rpcs) > 30
    for rpc in rpcs:
        assert len(rpc.own_comment.split()) >= 4, f"{rpc} has no comment"
        assert "rror" in rpc.comment, f"{rpc}: neither it nor its service names error reasons"
        assert [word for word in REASON.findall(rpc.comment) if len(word) > 5], f"{rpc} names no reason"


def test_every_method_has_one_timeout(rpcs):
    timeouts = read_service_configs().timeouts
    expected = {(f"{rpc.package}.{rpc.service}", rpc.name) for rpc in rpcs}
    assert set(timeouts) == expected
    for (service, method), seconds in timeouts.items():
        assert 10 <= seconds <= 86400, f"{service}/{method}"
        assert seconds >= LONGEST_WAITS.get(method, 0), f"{service}/{method} is cut off while it may still wait"


def test_a_method_is_retried_exactly_when_it_is_idempotent(rpcs):
    retries = read_service_configs().retries
    for rpc in rpcs:
        key = (f"{rpc.package}.{rpc.service}", rpc.name)
        assert (key in retries) == rpc.idempotent, rpc
    for key, policy in retries.items():
        assert policy["retryableStatusCodes"] == ["UNAVAILABLE"], key
        assert 2 <= policy["maxAttempts"] <= 5, key


@pytest.mark.parametrize("service", SERVICES)
def test_grpc_accepts_the_service_config(service):
    open_sync_channel("127.0.0.1:1", service).close()


def modules_of(tier: str) -> list[str]:
    """Modules that may define servicers."""
    files = sorted((ROOT / "services" / tier).rglob("servicer*.py"))
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]


def stub_bases(tier: str) -> dict[str, type]:
    """Generated servicer classes of a tier by name."""
    found = {}
    for file in sorted((PROTO / "gen" / "tetrarch" / tier / "v1").glob("*_service_pb2_grpc.py")):
        module = importlib.import_module(".".join(file.relative_to(PROTO / "gen").with_suffix("").parts))
        found |= {name: cls for name, cls in vars(module).items() if name.endswith("ServiceServicer")}
    return found


@pytest.mark.parametrize("tier", ["buffer", "rollout", "reward", "trainer"])
def test_every_method_is_implemented_by_its_tier(tier, rpcs):
    modules = modules_of(tier)
    assert modules, f"services/{tier} has no servicer"
    for module in modules:
        importlib.import_module(module)
    bases = stub_bases(tier)
    for rpc in rpcs:
        if rpc.package == f"tetrarch.{tier}.v1":
            base = bases[f"{rpc.service}Servicer"]
            ours = [cls for cls in base.__subclasses__() if cls.__module__.startswith(f"services.{tier}")]
            assert ours, f"services/{tier} does not serve {rpc.service}"
            assert getattr(ours[0], rpc.name) is not getattr(base, rpc.name), f"{rpc} is not implemented"
