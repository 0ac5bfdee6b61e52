"""The connection to a Redis or Valkey server, Sentinel or cluster: scripts, and failures with a name.

Knows nothing of runs. Every key of the project begins with "tetrarch:"; keys of one run share a hash tag, so
that a cluster keeps them on one node and scripts may touch them together.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from redis import exceptions as failures

from services.buffer.adapters.redis_address import Address, connect
from services.common.errors import Code, ServiceError

ROOT = "tetrarch:"
_LUA = Path(__file__).parent / "lua"
_FULL_RETRY_SECONDS = 5.0
_DISK_RETRY_SECONDS = 1.0
_REFUSES_WRITES = "MISCONF"
"""The store's word when its append-only file, or its dump, cannot be written."""


def run_prefix(run_id: str) -> str:
    """Prefix of all keys of a run."""
    return f"{ROOT}{{{run_id}}}:"


class Connection:
    """A pooled client, its scripts, and the translation of its failures.

    Args:
        url: see `redis_address`.
    """

    def __init__(self, url: str) -> None:
        where = Address.parse(url)
        self.client = connect(where)
        self.address = where.shown
        self.cluster = where.kind == "cluster"
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
            raise self.full("has reached its maxmemory") from error
        except failures.ResponseError as error:
            if _REFUSES_WRITES not in str(error):
                raise
            raise await self._disk_full(str(error)) from error
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
            failures.ClusterError,
            failures.RedisClusterException,
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
            answer = await self.client.time(**await self._one())
        seconds, micros = next(iter(answer.values())) if isinstance(answer, dict) else answer
        return seconds * 1000 + micros // 1000

    async def ping(self) -> None:
        """Returns when the store answers. Raises STORE_UNAVAILABLE."""
        async with self.errors():
            await self.client.ping()

    def full(self, why: str) -> ServiceError:
        """The error for a store that takes no more payload."""
        return ServiceError(
            Code.RESOURCE_EXHAUSTED,
            "STORE_FULL",
            f"The store at {self.address} {why}; raise it, or write checkpoints more often so that payloads are freed.",
            retry_seconds=_FULL_RETRY_SECONDS,
            address=self.address,
        )

    async def _disk_full(self, said: str) -> ServiceError:
        """The error for a store that cannot write its files, and so takes no writes: usually its disk is full."""
        directory = ""
        with contextlib.suppress(failures.RedisError, OSError):
            answer = await self.client.config_get("dir", **await self._one())
            directory = answer.get("dir", "")
        why = said[said.index(_REFUSES_WRITES) :].removeprefix(_REFUSES_WRITES).partition(" script:")[0].strip(" .,")
        return ServiceError(
            Code.RESOURCE_EXHAUSTED,
            "STORE_DISK_FULL",
            f"The store at {self.address} takes no writes until it can write its files"
            f"{f' in {directory}' if directory else ''} again ({why}); make room there.",
            retry_seconds=_DISK_RETRY_SECONDS,
            address=self.address,
            directory=directory,
        )

    async def _one(self) -> dict[str, Any]:
        """Arguments that send a command without a key to one server of a cluster, always the same."""
        if not self.cluster:
            return {}
        await self.client.initialize()
        return {"target_nodes": self.client.get_node_from_key(ROOT)}

    async def info(self, section: str) -> list[dict[str, Any]]:
        """A section of INFO of every server that holds keys."""
        async with self.errors():
            if not self.cluster:
                return [await self.client.info(section)]
            await self.client.initialize()
            answers = await self.client.info(section, target_nodes=self.client.get_primaries())
        return list(answers.values()) if all(isinstance(one, dict) for one in answers.values()) else [answers]

    async def delete_all(self, prefix: str, chunk: int, but: str) -> int:
        """Deletes every key that begins with `prefix` except `but`, `chunk` at a time, in the background of the store;
        → how many.

        The keys must share one hash tag. Each call of the store is short, however many keys it holds.
        """
        count, names = 0, []
        pattern = prefix.translate({ord(c): f"\\{c}" for c in "\\*?[]"}) + "*"
        async with self.errors():
            if self.cluster:
                await self.client.initialize()
            where = {"target_nodes": self.client.get_node_from_key(prefix)} if self.cluster else {}
            async for name in self.client.scan_iter(match=pattern, count=chunk, **where):
                if name != (prefix + but).encode():
                    names.append(name)
                if len(names) >= chunk:
                    count += await self.client.unlink(*names)
                    names = []
            if names:
                count += await self.client.unlink(*names)
        return count

    async def check(self) -> list[str]:
        """One sentence for every way in which the store may lose data. Raises STORE_UNSAFE when it surely will."""
        memory = (await self.info("memory"))[0]
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and int(memory.get("maxmemory", 0)):
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "STORE_UNSAFE",
                f"The store at {self.address} has maxmemory-policy {policy!r} and would delete groups when it is full;"
                " set its maxmemory-policy to noeviction.",
                address=self.address,
                policy=policy,
            )
        return await self.warnings()

    async def warnings(self) -> list[str]:
        """One sentence for every way in which the store may lose data."""
        persistence, memory, fsync = (await self.info("persistence"))[0], (await self.info("memory"))[0], ""
        async with self.errors():
            # Managed servers forbid CONFIG; INFO says enough then.
            with contextlib.suppress(failures.ResponseError):
                answer = await self.client.config_get("appendfsync", **await self._one())
                answer = next(iter(answer.values())) if "appendfsync" not in answer and answer else answer
                fsync = answer.get("appendfsync", "")
        found = []
        if not int(persistence.get("aof_enabled", 0)):
            found.append("it keeps no append-only file: a restart loses every run; start it with --appendonly yes")
        elif fsync == "no":
            found.append("appendfsync is 'no': a power loss may lose minutes; use everysec or always")
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
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
