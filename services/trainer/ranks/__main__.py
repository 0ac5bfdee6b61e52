"""A rank: connects to the controller's socket and serves commands until the connection closes.

Rank 0 serves the commands of `commands.ASIDE` on a second connection: those that only begin something in their order,
so that no group is joined after it was left, the others each on a thread of its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import threading
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING

from services.trainer.core import commands

if TYPE_CHECKING:
    from services.trainer.ranks.worker import RankWorker

_AT_ONCE = (commands.JoinGroups, commands.SendWeights, commands.GroupErrors, commands.LeaveGroups)
_CHECKSUM_NICENESS = 5
_SWITCH_SECONDS = 0.0002
"""A thread that begins a bucket must not wait Python's usual 5 ms for one that launches kernels."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="services.trainer.ranks", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket of the controller")
    parser.add_argument("--rank", type=int, required=True, help="global rank, from 0")
    parser.add_argument("--world-size", type=int, required=True, help="ranks in all")
    parser.add_argument("--master-port", type=int, required=True, help="rendezvous port of the world")
    parser.add_argument("--master-address", default="127.0.0.1", help="rendezvous host of the world")
    return parser.parse_args()


def _serve_aside(connection: Connection, worker: RankWorker) -> None:
    """Answers numbered commands, each when it is done; ends with the connection."""
    one_at_a_time = threading.Lock()

    def answer(number: int, command: commands.Command) -> None:
        if isinstance(command, commands.Checksums):
            # On a CPU they take its time, and the bytes that travel meanwhile come first. Of this thread alone.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _CHECKSUM_NICENESS)
        result = worker.execute(command)
        with one_at_a_time:
            connection.send((number, result))

    while True:
        try:
            number, command = connection.recv()
        except (EOFError, OSError):
            return
        if isinstance(command, _AT_ONCE):
            answer(number, command)
        else:
            threading.Thread(target=answer, args=(number, command), daemon=True).start()


def main() -> None:
    """Serves one command after the other on this thread."""
    arguments = _arguments()
    faulthandler.register(signal.SIGUSR1)  # all threads' stacks, also while one of them holds Python's lock
    # Read when torch loads its OpenMP: threads that spin while they wait make a step several times slower on a machine
    # whose cores are shared with engines.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    sys.setswitchinterval(_SWITCH_SECONDS)
    key = bytes.fromhex(os.environ[commands.KEY_VARIABLE])
    with Client(arguments.socket, family="AF_UNIX", authkey=key) as connection:
        connection.send(commands.Hello(arguments.rank, os.getpid()))
        if arguments.rank == 0:
            aside = Client(arguments.socket, family="AF_UNIX", authkey=key)
            aside.send(commands.Hello(0, os.getpid(), aside=True))
        from services.trainer.ranks.worker import RankWorker

        worker = RankWorker(arguments.rank, arguments.world_size, arguments.master_address, arguments.master_port)
        if arguments.rank == 0:
            threading.Thread(target=_serve_aside, args=(aside, worker), daemon=True).start()
        while True:
            try:
                command = connection.recv()
            except EOFError:
                break
            connection.send(worker.execute(command))
            if isinstance(command, commands.Shutdown):
                break
    # Threads of abandoned weight groups must not keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
