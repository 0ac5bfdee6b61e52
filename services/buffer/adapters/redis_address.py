"""Where a store is: one server, a service behind Sentinels, or a cluster.

redis://[user:password@]host[:port][/database]      one server (rediss:// with TLS, unix:///path)
redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/database]
redis+cluster://[user:password@]host[:port][,host[:port]...]
rediss+sentinel:// and rediss+cluster:// are the same with TLS.

Invariant: a password never appears in a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from redis import exceptions as failures
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialBackoff

from services.common.errors import ServiceError, invalid_field

_CONNECTIONS = 64
_CALL_SECONDS = 10.0
_CONNECT_SECONDS = 3.0
_PORTS = {"plain": 6379, "cluster": 6379, "sentinel": 26379}
_KINDS = {
    "redis": "plain", "rediss": "plain", "unix": "plain",
    "redis+sentinel": "sentinel", "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster", "rediss+cluster": "cluster",
}  # fmt: skip


@dataclass(frozen=True)
class Address:
    """A parsed `store_url`. `kind`: plain, sentinel or cluster."""

    kind: str
    url: str
    hosts: tuple[tuple[str, int], ...]
    user: str
    password: str
    service: str
    database: int
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises INVALID_FIELD."""
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in _KINDS:
            raise _invalid(_hidden(url), f"it must begin with one of {', '.join(f'{name}://' for name in _KINDS)}")
        kind = _KINDS[scheme]
        rest, _, _ = rest.partition("?")
        credentials, _, place = rest.rpartition("@")
        if scheme == "unix":
            return cls(kind, url, (), "", "", place, 0, tls=False)
        names, _, path = place.partition("/")
        user, _, password = credentials.partition(":")
        service, _, database = path.strip("/").partition("/") if kind == "sentinel" else ("", "", path.strip("/"))
        if kind == "sentinel" and not service:
            raise _invalid(_hidden(url), "name the service after the hosts, as in redis+sentinel://host:26379/mymaster")
        if database and not database.isdigit():
            raise _invalid(_hidden(url), f"the database {database!r} must be a number")
        if kind == "cluster" and database not in ("", "0"):
            raise _invalid(_hidden(url), "a cluster has no numbered databases; leave the number out")
        hosts = tuple(_host(part, _PORTS[kind], url) for part in names.split(","))
        return cls(
            kind, url, hosts, unquote(user), unquote(password), service, int(database or 0),
            tls=scheme.startswith("rediss"),
        )  # fmt: skip

    @property
    def shown(self) -> str:
        """The address without secrets."""
        if not self.hosts:
            return self.service
        places = ",".join(f"{host}:{port}" for host, port in self.hosts)
        if self.kind == "sentinel":
            return f"{self.service} of the Sentinels {places}"
        return f"{places}/{self.database}" if self.database else places


def connect(address: Address) -> Any:
    """A client that opens connections as it needs them; nothing is sent yet."""
    # One repetition covers a pooled connection that a restarted server closed; callers do the rest.
    retry = Retry(ExponentialBackoff(cap=0.2, base=0.05), 1)
    again = [failures.ConnectionError, failures.BusyLoadingError]
    timeouts = {"socket_timeout": _CALL_SECONDS, "socket_connect_timeout": _CONNECT_SECONDS}
    who = {"username": address.user or None, "password": address.password or None, "ssl": address.tls}
    if address.kind == "plain":
        pool = BlockingConnectionPool.from_url(
            address.url, max_connections=_CONNECTIONS, timeout=_CALL_SECONDS, retry=retry, retry_on_error=again,
            **timeouts,
        )  # fmt: skip
        return Redis(connection_pool=pool)
    if address.kind == "sentinel":
        sentinels = Sentinel(list(address.hosts), sentinel_kwargs=timeouts | {"ssl": address.tls})
        return sentinels.master_for(
            address.service, db=address.database, retry=retry, retry_on_error=again, **timeouts, **who
        )
    nodes = [ClusterNode(host, port) for host, port in address.hosts]
    return RedisCluster(startup_nodes=nodes, max_connections=_CONNECTIONS, **timeouts, **who)


def _host(part: str, default_port: int, url: str) -> tuple[str, int]:
    """(host, port) of "host", "host:port" or "[v6]:port"."""
    host, colon, port = part.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = part, str(default_port)
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise _invalid(_hidden(url), f"{part!r} is not a host and port")
    return host, int(port)


def _hidden(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _invalid(url: str, why: str) -> ServiceError:
    return invalid_field("store_url", url, why)
