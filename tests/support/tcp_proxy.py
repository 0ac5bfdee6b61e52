"""A TCP proxy for faults of a connection: cut (RST), silence, delay, a slow link. It runs on the test's own event loop.

Knows bytes only. Faults hold for connections that stand and for later ones until `mend`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time

_CHUNK = 16 * 1024
_CONNECT_SECONDS = 5.0
WAYS = ("up", "down")
"""Towards the target, and back."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class TcpProxy:
    """One listening port in front of one target; an async context manager.

    Args:
        target: host:port.
        host, port: where it listens; port 0 takes a free one.
    """

    def __init__(self, target: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self._target, self._host = target, host
        self.port = port
        self._server: asyncio.Server | None = None
        self._pairs: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self._passing = {way: asyncio.Event() for way in WAYS}
        self._pass_all()
        self._refusing = False
        self._delay = 0.0
        self._rate: float | None = None
        self._free_at = dict.fromkeys(WAYS, 0.0)
        self.accepted_count = 0
        """Connections so far."""
        self.byte_counts = dict.fromkeys(WAYS, 0)
        """Bytes passed, each way."""

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"{self._host}:{self.port}"

    @property
    def open_count(self) -> int:
        """Connections that stand."""
        return len(self._pairs)

    async def open(self) -> None:
        """Listens."""
        self._server = await asyncio.start_server(self._accept, self._host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and resets every connection."""
        if self._server:
            self._server.close()
        self._reset_all()
        await asyncio.gather(*self._pairs, return_exceptions=True)

    async def __aenter__(self) -> TcpProxy:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- faults

    def cut(self, *, refuse: bool = False) -> None:
        """Resets every connection. `refuse`: later ones as well, until `mend`."""
        self._refusing = refuse
        self._reset_all()

    def stall(self, *ways: str) -> None:
        """Passes nothing, either way or one; connections are accepted and stay open."""
        for way in ways or WAYS:
            self._passing[way].clear()

    def delay(self, seconds: float) -> None:
        """Holds every piece back that long before it is passed on."""
        self._delay = seconds

    def limit(self, bytes_per_second: float) -> None:
        """Passes no more than that in each direction, all connections together."""
        self._rate = bytes_per_second

    def mend(self) -> None:
        """Ends every fault; what was held back is passed on."""
        self._refusing, self._delay, self._rate = False, 0.0, None
        self._pass_all()

    def _pass_all(self) -> None:
        for passing in self._passing.values():
            passing.set()

    # -- connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted_count += 1
        task = asyncio.current_task()
        assert task
        self._pairs[task] = (writer,)
        end = _reset
        try:
            if self._refusing:
                return
            host, _, port = self._target.rpartition(":")
            async with asyncio.timeout(_CONNECT_SECONDS):
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
            self._pairs[task] = (writer, far_writer)
            ways = [self._pass("up", reader, far_writer), self._pass("down", far_reader, writer)]
            pumps = [asyncio.create_task(way) for way in ways]
            try:
                done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
                if len(done) == len(pumps) and not any(pump.exception() for pump in pumps):
                    end = asyncio.StreamWriter.close
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            for side in self._pairs.pop(task):
                end(side)

    async def _pass(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self._passing[way].wait()
            data = await reader.read(_CHUNK)
            await self._passing[way].wait()
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            if self._delay:
                await asyncio.sleep(self._delay)
            await self._wait_for_turn(way, len(data))
            self.byte_counts[way] += len(data)
            writer.write(data)
            await writer.drain()

    async def _wait_for_turn(self, way: str, size: int) -> None:
        if not self._rate:
            return
        now = time.monotonic()
        self._free_at[way] = max(self._free_at[way], now) + size / self._rate
        await asyncio.sleep(self._free_at[way] - now)

    def _reset_all(self) -> None:
        for task in list(self._pairs):
            task.cancel()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with a RST instead of a FIN."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
