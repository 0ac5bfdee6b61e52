"""Reward services as real processes: Tetrarch's own, and the example of an external one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tetrarch.reward.v1 import reward_service_pb2_grpc

from services.common.channel import open_sync_channel
from services.common.healthcheck import check
from services.common.process import free_port

ROOT = Path(__file__).resolve().parents[3]
USER_REWARDS = """
import asyncio, os, time

def troubled(item):
    match item.item_id:
        case "crash": os._exit(3)
        case "hang": time.sleep(600)
        case "raise": raise ValueError("no mood")
        case "nan": return float("nan")
    return 1.0

async def judge(args, sample):
    await asyncio.sleep(0.3)
    return float(sample.metadata["weight"])

async def stuck(item):
    if item.item_id == "hang": time.sleep(600)
    await asyncio.sleep(600 if item.item_id == "slow" else 0)
    return 1.0

async def grouped(args, samples):
    return [float(len(samples))] * len(samples)
"""


class Server:
    """A reward service in a process of its own. `graders`: what it must know."""

    def __init__(self, argv: list[str], port: int, directory: Path, grader: str) -> None:
        self.address, self.grader, self.directory = f"127.0.0.1:{port}", grader, directory
        self.process = subprocess.Popen(argv, cwd=directory, env=dict(os.environ), start_new_session=True)
        self.channel = open_sync_channel(self.address, "reward")
        self.stub = reward_service_pb2_grpc.RewardServiceStub(self.channel)

    def wait_until(self, ready) -> None:
        deadline = time.monotonic() + 40
        while not ready():
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server is not ready"
            time.sleep(0.1)

    def stop(self) -> int:
        self.channel.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


@pytest.fixture(scope="session")
def own(tmp_path_factory) -> Iterator[Server]:
    """`python -m services.reward`, started where the user's functions are."""
    directory, port = tmp_path_factory.mktemp("user"), free_port()
    (directory / "user_rewards.py").write_text(USER_REWARDS)
    settings = (f"port={port}", "item_timeout_seconds=1.5", "workers=3")
    argv = [sys.executable, "-m", "services.reward", *(part for setting in settings for part in ("--set", setting))]
    server = Server(argv, port, directory, "exact_match")
    try:
        server.wait_until(lambda: not check(server.address, "tetrarch.reward.v1.RewardService"))
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def example(tmp_path_factory) -> Iterator[Server]:
    """examples/external_reward/server.py."""
    port = free_port()
    argv = [sys.executable, str(ROOT / "examples/external_reward/server.py"), str(port)]
    server = Server(argv, port, tmp_path_factory.mktemp("example"), "brevity")
    try:
        # It has no health service; any answer shows that it is up.
        server.wait_until(lambda: "UNAVAILABLE" not in check(server.address))
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.channel.close()


@pytest.fixture(params=["own", "example"])
def server(request) -> Server:
    """Either service: what is asked of one is asked of both."""
    return request.getfixturevalue(request.param)
