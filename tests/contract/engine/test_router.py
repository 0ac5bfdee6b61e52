"""The real router in front of two simulated engines."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.common.errors import Code, ServiceError
from services.rollout.adapters.engine_http import poll
from services.rollout.adapters.router import SGLangRouter
from tests.contract.engine.test_generation import PROMPT, SECONDS, request
from tests.support.engine import VOCAB_SIZE, start_engine


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory):
    """Two engines that answer alike."""
    directory = tmp_path_factory.mktemp("routed")
    with ThreadPoolExecutor() as pool:
        started = list(pool.map(lambda _: start_engine("simulated", checkpoint, directory), range(2)))
    yield started
    for engine in started:
        engine.stop()


@pytest.fixture
async def router(tmp_path):
    """A running router without workers."""
    running = SGLangRouter("round_robin", log_path=tmp_path / "router.log")
    await running.start()
    yield running
    await running.stop()


async def add_all(router, engines) -> list:
    clients = [engine.client() for engine in engines]
    for client in clients:
        await router.add_worker(client.url, (await client.info()).limits)
    return clients


async def finished(client) -> int:
    """A number that grows with the prompts an engine has seen: it caches their prefix."""
    (generation,) = await client.generate(request(tokens=1), SECONDS)
    return generation.cached_tokens


async def test_requests_are_spread_and_answers_whole(router, engines):
    with pytest.raises(ServiceError) as caught:
        await router.generate(request(), SECONDS)
    assert caught.value.reason == "NO_ENGINE_READY"
    clients = await add_all(router, engines)
    await router.add_worker(clients[0].url, (await clients[0].info()).limits)  # again: no error
    assert set(await router.worker_urls()) == {client.url for client in clients}
    for _ in range(4):
        generations = await router.generate(request(count=3, stop_token_ids=(5,), extra={"min_p": 0.0}), SECONDS)
        assert len(generations) == 3
        assert all(len(g.output_ids) == len(g.log_probs) for g in generations)
    assert [await finished(client) for client in clients] == [len(PROMPT) - 1] * 2
    direct = await clients[0].generate(request(count=3), SECONDS)
    routed = await router.generate(request(count=3), SECONDS)
    assert [g.output_ids.tolist() for g in direct] == [g.output_ids.tolist() for g in routed]
    with pytest.raises(ServiceError, match=f"token id {VOCAB_SIZE}"):
        await router.generate(request(prompt=[VOCAB_SIZE]), SECONDS)
    with pytest.raises(ServiceError, match="temprature"):
        await router.generate(request(extra={"temprature": 1}), SECONDS)
    await router.remove_worker(clients[1].url)
    await router.remove_worker(clients[1].url)
    assert await router.worker_urls() == (clients[0].url,)
    assert (await router.generate(request(), SECONDS))[0].engine_url == clients[0].url
    for client in clients:
        await client.close()


async def test_a_router_that_dies_comes_back_with_its_workers(router, engines):
    clients = await add_all(router, engines)
    os.kill(router.pid, signal.SIGKILL)

    async def back() -> bool:
        return router.restart_count == 1

    assert await poll(back, 30.0)
    assert set(await router.worker_urls()) == {client.url for client in clients}
    assert len(await router.generate(request(count=2), SECONDS)) == 2
    for client in clients:
        await client.close()


async def test_an_engine_that_dies_costs_its_requests_a_retry(router, engines):
    """Last in this module: it kills the second engine."""
    clients = await add_all(router, engines)
    long = request(tokens=200, extra={"ignore_eos": True})
    running = [asyncio.create_task(router.generate(long, SECONDS)) for _ in range(6)]
    await asyncio.sleep(0.2)
    engines[1].stop()
    assert [len((await task)[0].output_ids) for task in running] == [200] * 6

    async def noticed() -> bool:
        return await router.worker_urls() == (clients[0].url,)

    assert await poll(noticed, 10.0, 0.2)
    assert len(await router.generate(request(), SECONDS)) == 1
    for client in clients:
        await client.close()


def test_a_policy_or_argument_the_node_owns_is_refused():
    for bad, arguments, named in (("fastest", {}, "round_robin"), ("random", {"port": 1}, "leave it out")):
        with pytest.raises(ServiceError, match=named) as caught:
            SGLangRouter(bad, arguments)
        assert caught.value.code is Code.INVALID_ARGUMENT
