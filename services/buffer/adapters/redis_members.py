"""Members with leases in the store: a key per member that expires by itself, and a set of their names.

Invariant: of two starts of a process under one name, the later one is listed. A process that was cut off, replaced and
comes back is refused, however long it was away (up to a day).
"""

from __future__ import annotations

import json
import math

from services.buffer.adapters.redis_connection import ROOT, Connection
from services.buffer.core.records import Member
from services.common.errors import Code, ServiceError

_PREFIX = ROOT + "{members}:"
_NAMES = _PREFIX + "names"
_MEMORY_SECONDS = 24 * 3600


class RedisMembers:
    """MemberStore over a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client = connection.client

    async def register(self, member: Member, ttl_seconds: float) -> tuple[int, bool]:
        """Adds or renews a member; → (when its lease expires, in ms of the store's clock; whether it was started again
        since the last time). Raises FENCED."""
        again = await self._fence(member)
        ttl = math.ceil(ttl_seconds * 1000)
        expire = await self._connection.now_ms() + ttl
        value = json.dumps(
            [member.member_id, member.tier, member.address, member.incarnation, member.attributes, expire]
        )
        async with self._connection.errors():
            pipe = self._client.pipeline(transaction=False)
            pipe.set(_PREFIX + "m:" + member.member_id, value, px=ttl)
            pipe.sadd(_NAMES, member.member_id)
            await pipe.execute()
        return expire, again

    async def _fence(self, member: Member) -> bool:
        """Notes the newest incarnation of a member; → whether it replaced another. Raises FENCED for one that was
        replaced."""
        newest, older = _PREFIX + "newest:" + member.member_id, _PREFIX + "older:" + member.member_id
        async with self._connection.errors():
            pipe = self._client.pipeline(transaction=False)
            pipe.getex(newest, ex=_MEMORY_SECONDS)
            pipe.sismember(older, member.incarnation)
            known, replaced = await pipe.execute()
            if replaced:
                raise ServiceError(
                    Code.FAILED_PRECONDITION,
                    "FENCED",
                    f"Member {member.member_id} was started again since: end this process, or give it another name.",
                    member_id=member.member_id,
                    incarnation=member.incarnation,
                )
            if known == member.incarnation.encode():
                return False
            pipe.set(newest, member.incarnation, ex=_MEMORY_SECONDS)
            if known is not None:
                pipe.sadd(older, known)
                pipe.expire(older, _MEMORY_SECONDS)
            await pipe.execute()
            return known is not None

    async def remove(self, member_id: str) -> None:
        """Removes a member, if it is there."""
        async with self._connection.errors():
            pipe = self._client.pipeline(transaction=False)
            pipe.delete(_PREFIX + "m:" + member_id)
            pipe.srem(_NAMES, member_id)
            await pipe.execute()

    async def members(self, tier: str) -> list[Member]:
        """Members of a tier ("" is all) whose lease has not expired, by id."""
        async with self._connection.errors():
            names = sorted(name.decode() for name in await self._client.smembers(_NAMES))
            values = await self._client.mget([_PREFIX + "m:" + name for name in names]) if names else []
        found = [Member(*json.loads(value)) for value in values if value is not None]
        return [member for member in found if not tier or member.tier == tier]
