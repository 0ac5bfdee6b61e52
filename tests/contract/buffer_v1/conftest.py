"""One Valkey and one server per module, in the test process; a run of its own for every test.

The tests of a module share one event loop: gRPC's poller binds to a loop, and starting and stopping servers on a
new loop for every test makes it hang now and then.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from services.buffer.app import App
from services.buffer.config import BufferSettings
from services.common.channel import open_channel
from tests.contract.buffer_v1.driver import Driver, write_data
from tests.support.valkey import valkey, valkey_url  # noqa: F401


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(prompts, checkpoint)."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(valkey_url: str) -> AsyncIterator[grpc.aio.Channel]:  # noqa: F811
    """Channel to a running buffer server."""
    app = App(BufferSettings(port=0, store_url=valkey_url, drain_seconds=0))
    await app.start()
    client = open_channel(f"127.0.0.1:{app.server.port}", "buffer")
    yield client
    await client.close()
    await app.stop()


@pytest.fixture
def driver(channel: grpc.aio.Channel, data: tuple[Path, Path], request: pytest.FixtureRequest) -> Driver:
    """A driver of a run named after the test."""
    run_id = re.sub(r"[^a-z0-9_]+", "-", request.node.name.lower())[:60].strip("-")
    return Driver(channel, run_id, *data)
