"""Engines under contract: one process of each kind a session, a fresh client a test.

Kinds (`tests.support.engine.KINDS`): `simulated`; `sglang-cpu` where an SGLang that runs on the CPU is installed;
`sglang-cuda` where SGLang is installed and a CUDA device is visible. TETRARCH_ENGINE_KINDS=sglang-cuda,simulated picks
some. On two devices the engine takes the last and this process, the trainer's side, the first, with NCCL between them;
on one the group is gloo's. What a release does not promise (`services.rollout.adapters.sglang_release`) is not asked of
it: such a test asserts what happens instead.

Every test has a limit: the first of a kind waits for its engine, the others have TEST_SECONDS.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.engine import KINDS, EngineProcess, missing, start_engine, write_checkpoint
from tests.support.weight_group import in_thread

VARIABLE = "TETRARCH_ENGINE_KINDS"
TEST_SECONDS = 60
FIRST_SECONDS = 300
SIMULATED = {"tokens_per_second": 200.0, "mean_response_len": 24.0}
NUMBERS = itertools.count()


def chosen_kinds() -> list[str]:
    """Kinds that run here and are asked for."""
    asked = [kind for kind in os.environ.get(VARIABLE, "").split(",") if kind]
    for kind in asked:
        if kind not in KINDS or missing(kind):
            why = missing(kind) if kind in KINDS else f"the kinds are {', '.join(KINDS)}"
            raise pytest.UsageError(f"{VARIABLE} asks for {kind!r}, but {why}.")
    return asked or [kind for kind in KINDS if not missing(kind)]


def pytest_generate_tests(metafunc):
    """A test that uses an engine runs on every kind."""
    if "engine_process" in metafunc.fixturenames:
        metafunc.parametrize("engine_process", chosen_kinds(), indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The first test of a kind waits for its engine, which on a busy machine takes a minute or two."""
    seen = set()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        kind = item.callspec.params.get("engine_process") if hasattr(item, "callspec") else item.path
        item.own_markers = [marker for marker in item.own_markers if marker.name != "timeout"]
        item.add_marker(pytest.mark.timeout(TEST_SECONDS if kind in seen else FIRST_SECONDS))
        seen.add(kind)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3 checkpoint in float32."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def starting(request, tmp_path_factory):
    """Futures of the engines that this session's tests need, all starting at once, each on a checkpoint of its kind."""
    wanted = {item.callspec.params.get("engine_process") for item in request.session.items if hasattr(item, "callspec")}
    directory = Path(os.environ.get("TETRARCH_ENGINE_LOGS") or tmp_path_factory.mktemp("engine"))
    directory.mkdir(parents=True, exist_ok=True)

    def start(kind: str) -> EngineProcess:
        model = write_checkpoint(tmp_path_factory.mktemp(kind), **KINDS[kind].checkpoint)
        return start_engine(kind, model, directory, simulated=SIMULATED)

    with ThreadPoolExecutor() as pool:
        futures = {kind: pool.submit(start, kind) for kind in KINDS if kind in wanted}
        yield futures
    for future in futures.values():
        if not future.exception():
            future.result().stop()


@pytest.fixture(scope="session")
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
def tensors(engine_process):
    """The checkpoint's tensors by name."""
    from safetensors.torch import load_file

    return load_file(engine_process.checkpoint / "model.safetensors")


@pytest.fixture
async def joined(engine, engine_process):
    """A group with the engine in it."""
    trainer = engine_process.trainer_side(f"weights-{next(NUMBERS)}")
    await meet(engine, trainer)
    yield trainer
    await part(engine, trainer)


async def meet(engine, trainer, seconds: float = 30.0) -> None:
    """Both join the group."""
    await asyncio.gather(in_thread(trainer.join, seconds=seconds), engine.join_group(trainer.spec, seconds))


async def part(engine, trainer, seconds: float = 20.0) -> None:
    """Both leave the group."""
    await asyncio.gather(in_thread(trainer.leave, seconds=seconds), engine.leave_group(trainer.spec.name, seconds))
