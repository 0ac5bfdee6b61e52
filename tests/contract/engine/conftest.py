"""Engines under contract: one process of each kind a session, a fresh client a test.

To add a kind (SGLang on CUDA, another release): add its factory to `tests.support.engine.FACTORIES` and its name
to KINDS.
"""

from __future__ import annotations

import pytest

from tests.support.engine import EngineProcess, start_engine, write_checkpoint

KINDS = ("simulated", "sglang-cpu")
GROUP_SECONDS = 4.0
SIMULATED = {"tokens_per_second": 200.0, "mean_response_len": 24.0}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3 checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session", params=KINDS)
def engine_process(request, checkpoint, tmp_path_factory) -> EngineProcess:
    """A running engine of each kind."""
    directory = tmp_path_factory.mktemp("engine")
    process = start_engine(request.param, checkpoint, directory, group_timeout=GROUP_SECONDS, simulated=SIMULATED)
    yield process
    process.stop()


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
