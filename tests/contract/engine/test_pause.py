"""Pausing with a request in flight, versions of tokens, and the prefix cache."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import Code, ServiceError
from services.common.records import VersionSpan
from tests.contract.engine.test_generation import PROMPT, SECONDS, long_request, request


def assert_versions(engine_process, generation, before: int, after: int) -> None:
    """Each token knows its version; in releases without spans all count as made by the older."""
    length = len(generation.output_ids)
    if not engine_process.release.version_spans:
        assert generation.versions == (VersionSpan(before, 0, length),)
        return
    assert [span.version for span in generation.versions] == [before, after]
    first, second = generation.versions
    assert 0 == first.start < first.end == second.start < second.end == length


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_request_goes_on_and_each_token_knows_its_version(engine, engine_process, mode):
    before = await engine.version() + 1
    await engine.set_version(before)
    running = asyncio.create_task(engine.generate(long_request(engine_process), SECONDS))
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
    assert len(generation.output_ids) == len(generation.log_probs) == engine_process.traits.long_tokens
    assert_versions(engine_process, generation, before, before + 1)


async def test_pause_by_abort_ends_what_runs(engine, engine_process):
    running = asyncio.create_task(engine.generate(long_request(engine_process), SECONDS))
    await asyncio.sleep(0.4)
    await engine.pause("abort")
    (generation,) = await running
    assert_aborted(engine_process, generation)
    await engine.resume()


def assert_aborted(engine_process, generation) -> None:
    """It ended before its length and kept what was made."""
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.output_ids) == len(generation.log_probs) < engine_process.traits.long_tokens


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


async def test_flush_is_refused_while_requests_hold_the_cache(engine, engine_process):
    running = asyncio.create_task(engine.generate(long_request(engine_process), SECONDS))
    await asyncio.sleep(0.3)
    await engine.pause("in_place")
    assert not await engine.flush_cache()
    await engine.resume()
    (generation,) = await running
    assert len(generation.output_ids) == engine_process.traits.long_tokens


async def test_a_version_goes_with_tokens_from_then_on(engine):
    version = await engine.version() + 7
    await engine.set_version(version)
    (generation,) = await engine.generate(request(), SECONDS)
    assert {span.version for span in generation.versions} == {version}


async def test_flush_works_while_retracted_requests_wait(engine, engine_process):
    """They recompute everything later, so the cache of old weights can go. Where a release does not think so, they are
    ended with what they made."""
    await engine.generate(request(tokens=1), SECONDS)
    running = asyncio.create_task(engine.generate(long_request(engine_process), SECONDS))
    await asyncio.sleep(0.3)
    await engine.pause("retract")
    assert await engine.flush_cache()
    await engine.resume()
    (generation,) = await running
    if engine_process.release.flushes_retracted:
        assert len(generation.output_ids) == engine_process.traits.long_tokens
    else:
        assert_aborted(engine_process, generation)
        (fresh,) = await engine.generate(request(tokens=1), SECONDS)
        assert fresh.cached_tokens == 0
    assert await engine.health(5.0)
