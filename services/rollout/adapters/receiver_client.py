"""The node's end of a receiver's Unix sockets: where they are, how a command is asked. Imports no torch.

One directory a node process, removed at its end; an engine's sockets lie in a folder of it named by the engine's port.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import secrets
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.errors import Code, ServiceError
from services.rollout.receiver.server import DIRECTORY, TOKEN, socket_path

_LONGEST_PATH = 100
"""Of a Unix socket are 107 bytes allowed."""
_LINE_BYTES = 1 << 26
"""Of an answer: a checksum of every tensor is 100 bytes of it."""
_MAKING = threading.Lock()
_CODES = {"NO_MEMORY": Code.RESOURCE_EXHAUSTED}


@functools.cache
def _base() -> tuple[Path, str]:
    """Directory of this process, readable by its user alone, and the token of its engines."""
    base = Path(tempfile.mkdtemp(prefix="tetrarch-"))
    if len(str(base)) > _LONGEST_PATH - len("/12345/12.sock"):
        base.rmdir()
        base = Path(tempfile.mkdtemp(prefix="tetrarch-", dir="/tmp"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    return base, secrets.token_hex(16)


def receiver_environment(port: int) -> dict[str, str]:
    """What the engine at `port` must find in its environment; makes its folder."""
    with _MAKING:  # two threads at once would make two
        base, token = _base()
    folder = base / str(port)
    folder.mkdir(exist_ok=True)
    return {DIRECTORY: str(folder), TOKEN: token}


class ReceiverSocket:
    """Commands to one tensor-parallel rank of one engine.

    Args:
        environment: see `receiver_environment`.
        rank: of the engine's.
        subject: the engine, for messages.
    """

    def __init__(self, environment: Mapping[str, str], rank: int, subject: str) -> None:
        self._path = socket_path(environment[DIRECTORY], rank)
        self._token = environment[TOKEN]
        self._subject = subject

    async def ask(self, command: str, timeout: float, **fields: Any) -> dict[str, Any]:
        """The answer to a command. Raises UNAVAILABLE/ENGINE_UNAVAILABLE when the process is gone,
        DEADLINE_EXCEEDED/ENGINE_TIMEOUT, and ENGINE_REFUSED with the receiver's sentence (`said` is its reason; code
        RESOURCE_EXHAUSTED when memory does not suffice)."""
        request = {"do": command, "token": self._token} | fields
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_unix_connection(str(self._path), limit=_LINE_BYTES)
                try:
                    writer.write(json.dumps(request).encode() + b"\n")
                    line = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError as error:
            raise ServiceError(
                Code.DEADLINE_EXCEEDED,
                "ENGINE_TIMEOUT",
                f"{self._subject}'s weight receiver did not answer {command} within {timeout:g} s.",
                command=command,
            ) from error
        except OSError as error:
            raise self._gone(command) from error
        if not line.endswith(b"\n"):
            raise self._gone(command)
        answer = json.loads(line)
        if not answer.pop("ok"):
            raise ServiceError(
                _CODES.get(answer["reason"], Code.FAILED_PRECONDITION),
                "ENGINE_REFUSED",
                f"{self._subject}'s weight receiver refused {command}: {answer['message']}.",
                said=answer["reason"],
            )
        return answer

    def _gone(self, command: str) -> ServiceError:
        return ServiceError(
            Code.UNAVAILABLE,
            "ENGINE_UNAVAILABLE",
            f"{self._subject}'s weight receiver does not answer {command}: its process is gone.",
            command=command,
        )

    async def ended(self) -> None:
        """Returns when the process that holds this receiver has gone."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path))
        except OSError:
            return
        try:
            await reader.read()
        except OSError:
            pass
        finally:
            writer.close()
