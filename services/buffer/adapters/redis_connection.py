"""The connection to a Redis or Valkey server: scripts, failures with a name, and a check that it keeps what it is told.

Knows nothing of runs. Every key of the project begins with "tetrarch:"; keys of one run share a hash tag, so
that a cluster keeps them on one node and scripts may touch them together.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from redis import exceptions as failures
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from services.common.errors import Code, ServiceError

ROOT = "tetrarch:"
_LUA = Path(__file__).parent / "lua"
_CONNECTIONS = 64
_CALL_SECONDS = 10.0
_CONNECT_SECONDS = 3.0


def run_prefix(run_id: str) -> str:
    """Prefix of all keys of a run."""
    return f"{ROOT}{{{run_id}}}:"


class Connection:
    """A pooled client, its scripts, and the translation of its failures.

    Args:
        url: redis://, rediss:// or unix:// address.
    """

    def __init__(self, url: str) -> None:
        self.client = Redis(
            connection_pool=BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=_CALL_SECONDS,
                socket_timeout=_CALL_SECONDS,
                socket_connect_timeout=_CONNECT_SECONDS,
                # One repetition covers a pooled connection that a restarted server closed; callers do the rest.
                retry=Retry(ExponentialBackoff(cap=0.2, base=0.05), 1),
                retry_on_error=[failures.ConnectionError, failures.BusyLoadingError],
            )
        )
        self.address = _without_secrets(url)
        common = (_LUA / "_common.lua").read_text(encoding="utf-8")
        texts = {path.stem: common + path.read_text(encoding="utf-8") for path in sorted(_LUA.glob("[a-z]*.lua"))}
        self._scripts = {name: (hashlib.sha1(text.encode()).hexdigest(), text) for name, text in texts.items()}

    async def run_script(self, name: str, run_id: str, args: Sequence[str | int | bytes]) -> list:
        """Answer of a script on a run: status as text, then raw values. Raises RUN_NOT_FOUND, STORE_UNAVAILABLE."""
        digest, text = self._scripts[name]
        key = run_prefix(run_id) + "run"
        async with self.errors():
            try:
                answer = await self.client.evalsha(digest, 1, key, *args)
            except failures.NoScriptError:
                # A store that restarted knows no scripts. EVAL brings the text along: it cannot fail so again.
                answer = await self.client.eval(text, 1, key, *args)
        status = answer[0].decode()
        if status == "RUN_NOT_FOUND":
            raise run_not_found(run_id)
        return [status, *answer[1:]]

    @contextlib.asynccontextmanager
    async def errors(self) -> AsyncIterator[None]:
        """Failures of the store inside become ServiceErrors."""
        try:
            yield
        except failures.OutOfMemoryError as error:
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED,
                "STORE_FULL",
                f"The store at {self.address} has reached its maxmemory; raise it, or write checkpoints more often so"
                " that payloads are freed.",
                retry_seconds=5.0,
                address=self.address,
            ) from error
        except failures.AuthenticationError as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "STORE_REFUSED",
                f"The store at {self.address} refuses the credentials of store_url.",
                address=self.address,
            ) from error
        except (
            failures.ConnectionError,
            failures.TimeoutError,
            failures.BusyLoadingError,
            failures.ReadOnlyError,
            OSError,
        ) as error:
            raise ServiceError(
                Code.UNAVAILABLE,
                "STORE_UNAVAILABLE",
                f"The store at {self.address} does not answer ({type(error).__name__}); start it, or correct"
                " store_url.",
                retry_seconds=0.5,
                address=self.address,
            ) from error

    async def now_ms(self) -> int:
        """The store's clock."""
        async with self.errors():
            seconds, micros = await self.client.time()
        return seconds * 1000 + micros // 1000

    async def ping(self) -> None:
        """Returns when the store answers. Raises STORE_UNAVAILABLE."""
        async with self.errors():
            await self.client.ping()

    async def warnings(self) -> list[str]:
        """One sentence for every way in which the store may lose data."""
        async with self.errors():
            persistence = await self.client.info("persistence")
            memory = await self.client.info("memory")
            fsync = ""
            # Managed servers forbid CONFIG; INFO says enough then.
            with contextlib.suppress(failures.ResponseError):
                fsync = (await self.client.config_get("appendfsync")).get("appendfsync", "")
        found = []
        if not int(persistence.get("aof_enabled", 0)):
            found.append("it keeps no append-only file: a restart loses every run; start it with --appendonly yes")
        elif fsync == "no":
            found.append("appendfsync is 'no': a power loss may lose minutes; use everysec or always")
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and int(memory.get("maxmemory", 0)):
            found.append(f"maxmemory-policy is {policy!r}: it may delete groups; set it to noeviction")
        return [f"The store at {self.address} may lose data: {problem}." for problem in found]

    async def close(self) -> None:
        """Closes all connections."""
        with contextlib.suppress(failures.RedisError):
            await self.client.aclose()


def run_not_found(run_id: str) -> ServiceError:
    """The error for a run that the store does not have."""
    return ServiceError(
        Code.NOT_FOUND, "RUN_NOT_FOUND", f"No run {run_id!r} in the store; create it first.", run_id=run_id
    )


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}{parts.path}"
