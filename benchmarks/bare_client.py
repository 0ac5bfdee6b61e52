"""A bare client of one engine: so many requests at a time, straight to /generate, answers read and counted.

What a researcher would write to see how fast an engine is: no router, no lease, no scoring, nothing kept.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Served:
    """`tokens`: output tokens of all answers."""

    seconds: float
    tokens: int


async def saturate(url: str, bodies: Sequence[Mapping[str, Any]], concurrency: int, timeout: float = 300.0) -> Served:
    """Posts every body to `url`/generate, `concurrency` at a time."""
    waiting = iter(bodies)
    tokens = 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal tokens
        for body in waiting:
            async with session.post(f"{url}/generate", json=body) as answer:
                answer.raise_for_status()
                read = json.loads(await answer.read())
            for item in read if isinstance(read, list) else [read]:
                tokens += len(item["meta_info"]["output_token_logprobs"])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(timeout)) as session:
        began = time.monotonic()
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work(session))
        return Served(time.monotonic() - began, tokens)


async def flush(url: str) -> None:
    """Drops an idle engine's prefix cache, so that both ways read the same prompts anew."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/flush_cache") as answer:
        await answer.read()
