"""Megatron ranks as processes on this host, commanded over a Unix socket.

Implements `ports.Ranks`. Every rank answers on a thread of its own, so that a cancelled call leaves its answer to be
read and dropped before the next command of that rank; commands of `ASIDE` have a connection of their own
(`rank_aside`) and wait for nothing. Invariants: after the first failure every call raises it
again; `stop` leaves no process and no socket behind; ranks die with this process (see ManagedProcess).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from services.common.process import ManagedProcess, hold_port
from services.common.telemetry import get_logger
from services.trainer.adapters.rank_aside import Aside
from services.trainer.core.commands import ASIDE, KEY_VARIABLE, Command, Failure, Hello, Result, Shutdown
from services.trainer.core.ports import RanksFailed

log = get_logger(__name__)

_STOP_SECONDS = 5.0
_STACKS_SECONDS = 1.0
"""For a rank that does not answer to write what its threads are at."""
_TAIL_LINES = 40


@dataclass
class _Rank:
    """One rank process with its connection and the thread that speaks to it."""

    process: ManagedProcess
    pipe: connection.Connection
    thread: ThreadPoolExecutor
    asking: asyncio.Future | None = None
    """The command in progress; it may outlive a cancelled call."""
    deadline: float = 0.0


class LocalRanks:
    """W rank processes of this host.

    Args:
        world_size: W.
        log_dir: rank-N.log goes there.
        name: what a rank is called, also its log.
        first_device: number of the first rank's device among those that can be seen.
        start_timeout: seconds for all ranks to say Hello.
        module: what a rank runs (`python -m module`).
        on_line: called with (rank, line) of their output.
    """

    def __init__(
        self,
        world_size: int,
        log_dir: str | Path,
        *,
        name: str = "rank",
        first_device: int = 0,
        start_timeout: float = 180.0,
        module: str = "services.trainer.ranks",
        on_line: Callable[[int, str], None] | None = None,
    ) -> None:
        self._world_size = world_size
        self._log_dir = Path(log_dir)
        self._name = name
        self._first_device = first_device
        self._start_timeout = start_timeout
        self._module = module
        self._on_line = on_line
        self._processes: list[ManagedProcess] = []
        self._ranks: list[_Rank] = []
        self._aside: Aside | None = None
        self._failure: RanksFailed | None = None
        self._failed = asyncio.Event()
        self._watchers: list[asyncio.Task] = []
        self._directory = ""
        self._port: socket.socket | None = None
        self._stopping = False

    @property
    def failure(self) -> RanksFailed | None:
        """Why the ranks cannot be used any more; None while they can."""
        return self._failure

    async def failed(self) -> RanksFailed:
        """`failure`, as soon as there is one."""
        await self._failed.wait()
        assert self._failure
        return self._failure

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Starts the processes and waits for their Hello. Raises RanksFailed."""
        key = secrets.token_bytes(32)
        self._directory = tempfile.mkdtemp(prefix="tetrarch-ranks-")
        path = f"{self._directory}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(self._world_size)
            listener.setblocking(False)
            # Rank 0 listens there once megatron has been imported, seconds later.
            self._port = hold_port()
            port = self._port.getsockname()[1]
            for rank in range(self._world_size):
                await self._launch(rank, path, port, key)
            try:
                await self._until_failure(self._accept_all(listener, key), self._start_timeout)
            except TimeoutError:
                missing = min(set(range(self._world_size)) - set(range(len(self._ranks))), default=0)
                raise self._fail(missing, f"did not start within {self._start_timeout:.0f} s") from None

    async def _launch(self, rank: int, path: str, port: int, key: bytes) -> None:
        threads = max(1, (os.cpu_count() or 1) // self._world_size)
        argv = [sys.executable, "-m", self._module, "--socket", path, "--rank", str(rank)]
        argv += ["--world-size", str(self._world_size), "--master-port", str(port)]
        process = ManagedProcess(
            f"{self._name} {rank}",
            argv,
            env={
                KEY_VARIABLE: key.hex(),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
                "LOCAL_RANK": str(self._first_device + rank),
                "PYTHONUNBUFFERED": "1",
            },
            log_path=self._log(rank),
            on_line=partial(self._on_line, rank) if self._on_line else None,
        )
        await process.start()
        self._processes.append(process)
        self._watchers.append(asyncio.create_task(self._watch(rank, process), name=f"watch rank {rank}"))

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"{self._name.replace(' ', '-')}-{rank}.log"

    async def _watch(self, rank: int, process: ManagedProcess) -> None:
        status = await process.wait()
        if not self._stopping:
            ended = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
            self._fail(rank, ended)

    async def _accept_all(self, listener: socket.socket, key: bytes) -> None:
        """Accepts one authenticated connection from every rank, and a second from rank 0."""
        loop = asyncio.get_running_loop()
        found: dict[int, _Rank] = {}
        while len(found) < self._world_size or self._aside is None:
            accepted, _ = await loop.sock_accept(listener)
            accepted.setblocking(True)
            pipe = connection.Connection(accepted.detach())
            thread = ThreadPoolExecutor(1, thread_name_prefix="rank")
            hello: Hello = await loop.run_in_executor(thread, _greet, pipe, key)
            if hello.aside:
                self._aside = Aside(pipe, thread)
            else:
                found[hello.rank] = _Rank(self._processes[hello.rank], pipe, thread)
        self._ranks = [found[rank] for rank in range(self._world_size)]

    async def _until_failure(self, work: Any, timeout: float) -> Any:
        """Result of `work`, unless a rank dies first. Raises RanksFailed, TimeoutError."""
        task = asyncio.ensure_future(work)
        try:
            # A watcher ends when its process has ended.
            await asyncio.wait([task, *self._watchers], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            if self._failure:
                raise self._failure
            raise TimeoutError
        finally:
            task.cancel()

    async def call_all(self, command: Command, timeout: float) -> list[Any]:
        """Values by rank. The first failure of any rank is everyone's."""
        calls = [asyncio.ensure_future(self.call(rank, command, timeout)) for rank in range(self._world_size)]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def call(self, rank: int, command: Command, timeout: float) -> Any:
        """The rank's value. Raises RanksFailed when it reports an error, dies, or is silent for `timeout` seconds."""
        if self._failure:
            raise self._failure
        if not self._ranks:
            raise self._fail(rank, "was asked before it had started")
        if isinstance(command, ASIDE):
            assert self._aside, "start() comes first"
            return await self._answer(rank, command, self._aside.ask(command), timeout)
        target = self._ranks[rank]
        await self._until_free(rank, target)
        asking = asyncio.get_running_loop().run_in_executor(target.thread, _ask, target.pipe, command)
        target.asking, target.deadline = asking, time.monotonic() + timeout
        try:
            return await self._answer(rank, command, asyncio.shield(asking), timeout)
        finally:
            if not asking.done():
                asking.add_done_callback(_drop)

    async def _answer(self, rank: int, command: Command, asking: Awaitable, timeout: float) -> Any:
        """Value of the answer that `asking` brings. Raises RanksFailed."""
        name = type(command).__name__
        try:
            answer = await asyncio.wait_for(asking, timeout)
        except TimeoutError:
            self._processes[rank].signal(signal.SIGUSR1)  # it writes its threads' stacks into its log
            await asyncio.sleep(_STACKS_SECONDS)
            raise self._fail(rank, f"did not answer {name} within {timeout:.0f} s") from None
        except (EOFError, OSError):
            with contextlib.suppress(TimeoutError):  # its exit status says more than the closed connection
                await asyncio.wait_for(asyncio.shield(self._watchers[rank]), 2.0)
            raise (self._failure or self._fail(rank, f"closed its connection during {name}")) from None
        if isinstance(answer, Failure):
            log.error(f"{self._name} failed", rank=rank, command=name, error=answer.error, traceback=answer.traceback)
            said = answer.error.removeprefix(f"Rank {rank} failed in {name}: ")
            raise self._fail(rank, f"failed in {name}: {said}", cause=answer.reason)
        assert isinstance(answer, Result)
        return answer.value

    async def _until_free(self, rank: int, target: _Rank) -> None:
        """Waits for the answer that a cancelled call left behind, by that call's own deadline."""
        if target.asking is None or target.asking.done():
            return
        await asyncio.wait([target.asking], timeout=max(target.deadline - time.monotonic(), 0.0))
        if not target.asking.done():
            raise self._fail(rank, "did not answer a command that was given up")

    def _fail(self, rank: int, what: str, *, cause: str = "") -> RanksFailed:
        """Remembers and returns the first failure; `cause`: the reason that the rank itself gave."""
        if self._failure is None:
            tail = [line for line in self._processes[rank].tail(_TAIL_LINES) if line.strip()] if self._processes else []
            said = f"; its last line: {tail[-1][:500]}" if tail and not cause else ""
            text = f"{self._name.capitalize()} {rank} {what.rstrip('.')}{said} (log {self._log(rank)})."
            self._failure = RanksFailed(rank, text, answered=bool(cause), cause=cause)
            self._failed.set()
        return self._failure

    async def stop(self) -> None:
        """Ends all ranks: by Shutdown when they are well, else by signal."""
        self._stopping = True
        if self._ranks and self._failure is None:
            calls = [self.call(rank, Shutdown(), _STOP_SECONDS) for rank in range(self._world_size)]
            await asyncio.gather(*calls, return_exceptions=True)
            ends = [asyncio.ensure_future(process.wait()) for process in self._processes]
            await asyncio.wait(ends, timeout=_STOP_SECONDS)
        await asyncio.gather(*(process.stop(1.0) for process in self._processes), return_exceptions=True)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if self._aside:
            self._aside.close()
        for rank in self._ranks:
            rank.thread.shutdown(wait=False)
            with contextlib.suppress(OSError):
                rank.pipe.close()
        if self._port:
            self._port.close()
        if self._directory:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self._failure = self._failure or RanksFailed(0, "The ranks were stopped.", answered=False)
        self._failed.set()


def _greet(pipe: connection.Connection, key: bytes) -> Hello:
    """The listener's side of multiprocessing.connection's mutual authentication, then the rank's Hello."""
    connection.deliver_challenge(pipe, key)
    connection.answer_challenge(pipe, key)
    return pipe.recv()


def _ask(pipe: connection.Connection, command: Command) -> Any:
    pipe.send(command)
    return pipe.recv()


def _drop(asking: asyncio.Future) -> None:
    """The answer of a call nobody waits for."""
    if not asking.cancelled():
        asking.exception()
