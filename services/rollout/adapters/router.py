"""The router in front of the engines: a supervised sglang-router process and a client of it.

The process is sglang-router itself; it balances by a policy, probes
the engines and retries a request elsewhere when an engine fails before it answered. This module starts it,
restarts it when it ends by itself, keeps the list of workers in it equal to the node's, and sends `/generate`.
Knows nothing of runs, leases or weights. Tested with sglang-router 0.3.2.

What is to be recorded of a generation does not pass the process; such requests go to the engines directly.

Invariants: a request beyond the limits of any worker never leaves this process; add and remove return only
after the router lists the change; after a restart the router has the same workers as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.errors import Code, ServiceError
from services.common.process import ManagedProcess, free_port
from services.common.telemetry import get_logger
from services.rollout.adapters import engine_http
from services.rollout.adapters.engine_http import HttpClient
from services.rollout.adapters.sglang_launch import command_line
from services.rollout.core.engine_port import Generation, GenerationRequest, RequestLimits

LAUNCHER = "services.rollout.adapters.router_launcher"
START_SECONDS = 60.0
CONTROL_SECONDS = 5.0
WORKER_SECONDS = 15.0
RESTART_PAUSE_SECONDS = 0.5
POLICIES = ("round_robin", "random", "cache_aware", "power_of_two", "manual")

DEFAULTS: dict[str, Any] = {
    "health_check_interval_secs": 2,
    "health_check_timeout_secs": 2,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
    "worker_startup_timeout_secs": 60,
    "worker_startup_check_interval": 1,
    "request_timeout_secs": 3600,
    "retry_max_retries": 5,
    "retry_initial_backoff_ms": 50,
    # An engine that failed ten times is tried again after this; the default of 60 s outlasts its restart.
    "cb_timeout_duration_secs": 5,
    "log_level": "warn",
}
PASSED = {
    "ebnf",
    "frequency_penalty",
    "ignore_eos",
    "json_schema",
    "min_new_tokens",
    "min_p",
    "no_stop_trim",
    "presence_penalty",
    "regex",
    "repetition_penalty",
    "sampling_seed",
    "skip_special_tokens",
}
"""Sampling keys that reach an engine. The router rebuilds a request from the keys it knows and silently drops
others (`logit_bias`, `custom_params`, `stop_regex`, …), so those are refused here."""
OWNED = ("host", "port", "policy", "worker_urls", "prometheus_port", "prometheus_host", "pd_disaggregation")


class SGLangRouter:
    """A `Router` backed by one sglang-router process.

    Args:
        policy: `sglang_router_strategy`, one of POLICIES.
        arguments: pass-through router arguments, over DEFAULTS.
        log_path: file for the process's output.
    """

    def __init__(
        self, policy: str = "round_robin", arguments: Mapping[str, Any] | None = None, log_path: Path | None = None
    ) -> None:
        self._arguments = DEFAULTS | _check(policy, arguments or {})
        self._log_path = log_path
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._client = HttpClient(self.url, "The router")
        self._process: ManagedProcess | None = None
        self._watcher: asyncio.Task | None = None
        self._limits: dict[str, RequestLimits] = {}
        self._direct: dict[str, HttpClient] = {}
        self._direct_load: dict[str, int] = {}
        """Samples on their way to an engine past the router's process."""
        self._lock = asyncio.Lock()
        self.restart_count = 0

    @property
    def pid(self) -> int:
        """Process id of the router; 0 before the start."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        await self._launch()
        self._watcher = asyncio.create_task(self._watch(), name="router watcher")

    async def stop(self) -> None:
        if self._watcher:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None
        if self._process:
            await self._process.stop(2.0)
        await asyncio.gather(*(client.close() for client in (self._client, *self._direct.values())))

    async def add_worker(self, url: str, limits: RequestLimits) -> None:
        async with self._lock:
            await self._register(url)
            self._limits[url] = limits

    async def remove_worker(self, url: str) -> None:
        async with self._lock:
            self._limits.pop(url, None)
            worker = (await self._workers()).get(url)
            if worker is None:
                return
            path = f"/workers/{worker['id']}"
            status, answer = await self._client.call("DELETE", path, timeout=CONTROL_SECONDS)
            if status >= 300 and status != 404:
                raise self._client.refused(path, status, answer)

            async def gone() -> bool:
                return url not in await self._workers()

            if not await engine_http.poll(gone, WORKER_SECONDS):
                raise _unavailable(f"The router at {self.url} still routes to {url} after {WORKER_SECONDS:g} s.")

    async def worker_urls(self) -> tuple[str, ...]:
        return tuple(url for url, worker in (await self._workers()).items() if worker.get("is_healthy", True))

    async def generate(self, request: GenerationRequest, timeout: float) -> list[Generation]:
        if not self._limits:
            raise ServiceError(
                Code.UNAVAILABLE,
                "NO_ENGINE_READY",
                f"Request {request.request_id} cannot be served: no engine of this node holds verified weights yet.",
                retry_seconds=1.0,
                request_id=request.request_id,
            )
        lost = sorted(set(request.extra) - PASSED)
        if lost:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INVALID_FIELD",
                f"Request {request.request_id} sets the sampling key {lost[0]}, which does not reach an engine through "
                f"the router: use {', '.join(sorted(PASSED))}, or the keys of the run.",
                request_id=request.request_id,
                key=lost[0],
            )
        for limits in set(self._limits.values()):
            limits.check(request)
        if request.record:
            return await self._generate_directly(request, timeout)
        only = next(iter(self._limits)) if len(self._limits) == 1 else None
        return await engine_http.generate(self._client, request, timeout, only)

    async def _generate_directly(self, request: GenerationRequest, timeout: float) -> list[Generation]:
        """From the engine with the fewest such requests: the router's process would drop what is to be recorded."""
        url = min(self._limits, key=lambda url: self._direct_load.get(url, 0))
        if url not in self._direct:
            self._direct[url] = HttpClient(url, "The engine")
        self._direct_load[url] = self._direct_load.get(url, 0) + request.sample_count
        try:
            return await engine_http.generate(self._direct[url], request, timeout, url)
        finally:
            self._direct_load[url] -= request.sample_count

    async def _launch(self) -> None:
        if importlib.util.find_spec("sglang_router") is None:
            raise _unavailable("The package sglang-router is not installed beside this node: run `make setup`.")
        flags = command_line(
            {"host": "127.0.0.1", "port": self._port, "prometheus_port": free_port()} | self._arguments
        )
        argv = [sys.executable, "-m", LAUNCHER, *flags]
        self._process = ManagedProcess("router", argv, log_path=self._log_path)
        await self._process.start()

        async def ready() -> bool:
            if not self._process.running:
                return True
            with contextlib.suppress(ServiceError):
                status, _ = await self._client.call("GET", "/liveness", timeout=1.0)
                return status == 200
            return False

        up = await engine_http.poll(ready, START_SECONDS, 0.1)
        if not up or not self._process.running:
            said = " ".join(self._process.tail(3)) or "no output"
            status = self._process.returncode
            await self._process.stop(1.0)
            raise _unavailable(f"The router did not start on port {self._port} (exit status {status}): {said}")

    async def _watch(self) -> None:
        """Restart the process whenever it ends, with the workers it had."""
        log = get_logger("rollout.router")
        while True:
            status = await self._process.wait()
            log.warning("router ended, restarting", exit_status=status, last_line=" ".join(self._process.tail(1)))
            try:
                await self._launch()
                async with self._lock:
                    await asyncio.gather(*(self._register(url) for url in self._limits))
                self.restart_count += 1
            except ServiceError as error:
                log.warning("router restart failed", error=error.message)
            await asyncio.sleep(RESTART_PAUSE_SECONDS)

    async def _register(self, url: str) -> None:
        if url in await self._workers():
            return
        await self._client.expect("POST", "/workers", {"url": url}, timeout=CONTROL_SECONDS)

        async def listed() -> bool:
            worker = (await self._workers()).get(url)
            return worker is not None and worker.get("is_healthy", True)

        if not await engine_http.poll(listed, WORKER_SECONDS):
            raise _unavailable(f"The router at {self.url} did not accept {url} within {WORKER_SECONDS:g} s.")

    async def _workers(self) -> dict[str, dict[str, Any]]:
        answer = await self._client.expect("GET", "/workers", timeout=CONTROL_SECONDS)
        return {worker["url"].rstrip("/"): worker for worker in answer.get("workers", [])}


def _check(policy: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if policy not in POLICIES:
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
            f"sglang_router_strategy is {policy!r}: use one of {', '.join(POLICIES)}.",
            field="sglang_router_strategy",
            value=policy,
        )
    named = {key.lstrip("-").replace("-", "_"): value for key, value in arguments.items()}
    for key in OWNED:
        if key in named:
            remedy = "set sglang_router_strategy" if key == "policy" else "leave it out"
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INVALID_FIELD",
                f"sglang_router.{key} is {named[key]!r}, but the rollout node sets this argument itself: {remedy}.",
                field=f"sglang_router.{key}",
                value=named[key],
            )
    return {"policy": policy, **named}


def _unavailable(message: str) -> ServiceError:
    return ServiceError(Code.UNAVAILABLE, "ROUTER_UNAVAILABLE", message)
