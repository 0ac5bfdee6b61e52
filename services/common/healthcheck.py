"""`python -m services.common.healthcheck host:port [full.service.Name]`: exits 0 when serving (for compose)."""

from __future__ import annotations

import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def check(address: str, service: str = "", timeout: float = 3.0) -> str:
    """Empty string when the service is SERVING, else one sentence."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            response = stub.Check(request, timeout=timeout)
        except grpc.RpcError as error:
            return f"{address} does not answer: {error.code().name}."
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return "" if name == "SERVING" else f"{service or 'the process'} at {address} is {name}."


def main() -> int:
    """Command line entry."""
    if not 2 <= len(sys.argv) <= 3:
        print("usage: python -m services.common.healthcheck host:port [full.service.Name]", file=sys.stderr)
        return 2
    problem = check(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    raise SystemExit(main())
