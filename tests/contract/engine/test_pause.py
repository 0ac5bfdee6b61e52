"""Pausing with a request in flight, versions of tokens, and the prefix cache."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import Code, ServiceError
from tests.contract.engine.test_generation import PROMPT, SECONDS, request

LONG = 300


def long_request():
    return request(tokens=LONG, extra={"ignore_eos": True})


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_request_goes_on_and_each_token_knows_its_version(engine, mode):
    before = await engine.version() + 1
    await engine.set_version(before)
    running = asyncio.create_task(engine.generate(long_request(), SECONDS))
    await asyncio.sleep(0.4)
    await engine.pause(mode)
    assert not running.done()
    await engine.set_version(before + 1)
    assert await engine.version() == before + 1
    await asyncio.sleep(0.2)
    assert not running.done()
    await engine.resume()
    (generation,) = await running
    assert generation.finish_reason == "length"
    assert len(generation.output_ids) == len(generation.log_probs) == LONG
    assert [span.version for span in generation.versions] == [before, before + 1]
    first, second = generation.versions
    assert 0 == first.start < first.end == second.start < second.end == LONG


async def test_pause_by_abort_ends_what_runs(engine):
    running = asyncio.create_task(engine.generate(long_request(), SECONDS))
    await asyncio.sleep(0.4)
    await engine.pause("abort")
    (generation,) = await running
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.output_ids) == len(generation.log_probs) < LONG
    await engine.resume()


async def test_a_request_during_a_pause_waits_for_its_end(engine):
    await engine.pause("retract")
    waiting = asyncio.create_task(engine.generate(request(), SECONDS))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await engine.resume()
    assert len(await waiting) == 1


async def test_an_unknown_pause_mode_is_refused(engine):
    with pytest.raises(ServiceError, match="retract, in_place, abort") as caught:
        await engine.pause("wait")
    assert caught.value.code is Code.INVALID_ARGUMENT


async def test_flush_empties_the_prefix_cache(engine):
    await engine.generate(request(tokens=1), SECONDS)
    (cached,) = await engine.generate(request(tokens=1), SECONDS)
    assert cached.cached_tokens == len(PROMPT) - 1
    assert await engine.flush_cache()
    (fresh,) = await engine.generate(request(tokens=1), SECONDS)
    assert fresh.cached_tokens == 0


async def test_flush_is_refused_while_requests_hold_the_cache(engine):
    running = asyncio.create_task(engine.generate(long_request(), SECONDS))
    await asyncio.sleep(0.3)
    await engine.pause("in_place")
    assert not await engine.flush_cache()
    await engine.resume()
    await running


async def test_a_version_goes_with_tokens_from_then_on(engine):
    version = await engine.version() + 7
    await engine.set_version(version)
    (generation,) = await engine.generate(request(), SECONDS)
    assert {span.version for span in generation.versions} == {version}


async def test_flush_works_while_retracted_requests_wait(engine):
    """They recompute everything later, so the cache of old weights can go."""
    running = asyncio.create_task(engine.generate(long_request(), SECONDS))
    await asyncio.sleep(0.3)
    await engine.pause("retract")
    assert await engine.flush_cache()
    await engine.resume()
    (generation,) = await running
    assert len(generation.output_ids) == LONG
