"""Engines under contract: one process of each kind a session, a fresh client a test.

To add a kind (SGLang on CUDA, another release): add its factory to `tests.support.engine.FACTORIES` and its name
to KINDS.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.engine import EngineProcess, start_engine, write_checkpoint

KINDS = ("simulated", "sglang-cpu")
GROUP_SECONDS = 4.0
SIMULATED = {"tokens_per_second": 200.0, "mean_response_len": 24.0}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3 checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def pytest_collection_modifyitems(items):
    """The first test of a kind waits for its engine, which on a busy machine takes a minute."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def starting(request, checkpoint, tmp_path_factory):
    """Futures of the engines that this session's tests need, all starting at once."""
    wanted = {item.callspec.params.get("engine_process") for item in request.session.items if hasattr(item, "callspec")}
    directory = tmp_path_factory.mktemp("engine")
    options = {"group_timeout": GROUP_SECONDS, "simulated": SIMULATED}
    with ThreadPoolExecutor() as pool:
        futures = {
            kind: pool.submit(start_engine, kind, checkpoint, directory, **options) for kind in KINDS if kind in wanted
        }
        yield futures
    for future in futures.values():
        if not future.exception():
            future.result().stop()


@pytest.fixture(scope="session", params=KINDS)
def engine_process(request, starting) -> EngineProcess:
    """A running engine of each kind."""
    return starting[request.param].result()


@pytest.fixture
async def engine(engine_process):
    """A client of the engine, which is left decoding, idle, with its checkpoint's weights or others."""
    client = engine_process.client()
    yield client
    await client.resume()
    await client.close()


@pytest.fixture
def tensors(checkpoint):
    """The checkpoint's tensors by name."""
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")
