"""Child processes that never outlive their parent and are ended by pid.

Invariants: a child leads a process group of its own; it receives SIGKILL when the thread that started it
ends (Linux PR_SET_PDEATHSIG), so a killed supervisor leaves no orphan; stopping it signals the whole group.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_PORT_TRIES = 100


def _die_with_parent() -> None:
    """Runs in the child between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port(host: str = "127.0.0.1", highest: int = 65535) -> int:
    """A TCP port up to `highest` that was free a moment ago. Raises OSError when the system offers none."""
    with contextlib.ExitStack() as higher:  # held meanwhile, or they would be offered again
        for _ in range(_PORT_TRIES):
            probe = higher.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind((host, 0))
            if (port := probe.getsockname()[1]) <= highest:
                return port
    raise OSError(f"none of {_PORT_TRIES} free ports is at most {highest}")


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """A free TCP port that stays free until the socket is closed: only who listens with SO_REUSEADDR, and knows the
    number, gets it. For a listener that comes much later, as torch's rendezvous does."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def port_in_use(port: int, host: str = "127.0.0.1") -> bool:
    """True when nothing can bind the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


class _Log:
    """The file of a child's output. A full disk costs lines; it must not keep the child from going on, as a pipe that
    nobody reads would."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = -1

    def __enter__(self) -> _Log:
        self.write("")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def write(self, text: str) -> None:
        """Appends text if that is possible."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            if self._file < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.write(self._file, text.encode())


class ManagedProcess:
    """A child process with its output.

    Args:
        name: for messages.
        argv: program and arguments.
        env: variables added to this process's environment.
        log_path: file that receives output as well; its directory is made.
        on_line: called with every line of output (stdout and stderr together).
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self._env = {**os.environ, **(env or {})}
        self._log_path = Path(log_path) if log_path else None
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=200)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while running or before the start."""
        return self._process.returncode if self._process else None

    @property
    def running(self) -> bool:
        """True between start and end."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts the child."""
        self._process = await asyncio.create_subprocess_exec(
            *self.argv,
            env=self._env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            limit=1 << 20,
        )
        self._reader = asyncio.create_task(self._read(), name=f"output of {self.name}")

    async def _read(self) -> None:
        assert self._process
        assert self._process.stdout
        with _Log(self._log_path) as log:
            while True:
                try:
                    raw = await self._process.stdout.readline()
                except ValueError:  # a line longer than the limit: skip what is buffered of it
                    continue
                if not raw:
                    return
                line = raw.decode("utf-8", "replace").rstrip()
                self._lines.append(line)
                log.write(line + "\n")
                if self._on_line:
                    with contextlib.suppress(OSError):  # a terminal that is gone, a file on a full disk
                        self._on_line(line)

    def tail(self, count: int = 20) -> list[str]:
        """Last lines of output."""
        return list(self._lines)[-count:]

    async def wait(self) -> int:
        """Waits for the end; returns the exit status."""
        assert self._process, "start() comes first"
        status = await self._process.wait()
        if self._reader:
            # A grandchild may hold the pipe open; its output is not worth waiting for.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reader), 1.0)
        return status

    def signal(self, number: int) -> None:
        """Sends a signal to the child's group; nothing when it is gone."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def stop(self, grace_seconds: float = 5.0) -> int | None:
        """SIGTERM, then SIGKILL to the group after `grace_seconds`; returns the exit status."""
        if not self._process:
            return None
        if self._process.returncode is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_seconds)
        self.signal(signal.SIGKILL)  # grandchildren too
        status = await self._process.wait()
        if self._reader:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        return status
