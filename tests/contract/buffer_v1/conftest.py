"""One Valkey and one server per module, in the test process; a run of its own for every test.

Under `python -m tetrarch_contract` the server is the one whose address was given, and what needs control of its store
or process is left out.

The tests of a module share one event loop: gRPC's poller binds to a loop, and starting and stopping servers on a
new loop for every test makes it hang now and then.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from services.buffer.adapters.redis_connection import Connection
from services.buffer.app import App
from services.buffer.config import BufferSettings
from services.common.channel import open_channel
from services.common.errors import ServiceError
from tests.contract.buffer_v1.driver import Driver, write_data
from tests.support.valkey import valkey, valkey_url  # noqa: F401
from tetrarch_contract.report import Report

OURS = {"valkey", "valkey_url", "connection", "monkeypatch"}
"""Fixtures of tests that look into our own server's store or process."""
OUR_MODULES = {"test_places"}
"""Whose tests start servers and stores."""


def given(config: pytest.Config) -> Report | None:
    """The command's report with the server's address; None when we start a server of our own."""
    return next((plugin for plugin in config.pluginmanager.get_plugins() if isinstance(plugin, Report)), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only works with a server of our own."""
    if given(config) is None:
        return
    for item in items:
        code = getattr(getattr(item, "function", None), "__code__", None)
        if OURS & set(getattr(item, "fixturenames", ())) or item.path.stem in OUR_MODULES:
            item.add_marker(pytest.mark.skip(reason="needs control of the server's store or process"))
        elif code and "chooser" in code.co_names:
            item.add_marker(
                pytest.mark.skip(reason="its functions lie beside the tests, where the server may not see them")
            )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(prompts, checkpoint)."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(request: pytest.FixtureRequest) -> AsyncIterator[grpc.aio.Channel]:
    """Channel to a running buffer server."""
    report = given(request.config)
    if report:
        async with open_channel(report.target, "buffer") as client:
            yield client
        return
    url = request.getfixturevalue("valkey_url")
    app = App(BufferSettings(port=0, store_url=url, drain_seconds=0))
    await app.start()
    client = open_channel(f"127.0.0.1:{app.server.port}", "buffer")
    yield client
    await client.close()
    await app.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def connection(valkey_url: str) -> AsyncIterator[Connection]:  # noqa: F811
    """A connection of the test's own to the store."""
    made = Connection(valkey_url)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def driver(
    channel: grpc.aio.Channel, data: tuple[Path, Path], request: pytest.FixtureRequest
) -> AsyncIterator[Driver]:
    """A driver of a run named after the test."""
    name = re.sub(r"[^a-z0-9_]+", "-", request.node.name.lower()).strip("-")
    report = given(request.config)
    if report is None:
        yield Driver(channel, name[:60].strip("-"), *data)
        return
    made = Driver(channel, f"{report.run_prefix}-{name}"[:60].strip("-"), *data)
    yield made
    with contextlib.suppress(ServiceError):
        await made.call("DeleteRun", force=True)
