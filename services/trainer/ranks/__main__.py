"""A rank: connects to the controller's socket and serves commands until the connection closes."""

from __future__ import annotations

import argparse
import os
import sys
from multiprocessing.connection import Client

from services.trainer.core import commands


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="services.trainer.ranks", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket of the controller")
    parser.add_argument("--rank", type=int, required=True, help="global rank, from 0")
    parser.add_argument("--world-size", type=int, required=True, help="ranks in all")
    parser.add_argument("--master-port", type=int, required=True, help="rendezvous port of the world")
    parser.add_argument("--master-address", default="127.0.0.1", help="rendezvous host of the world")
    return parser.parse_args()


def main() -> None:
    """Serves one command after the other on this thread."""
    arguments = _arguments()
    # Read when torch loads its OpenMP: threads that spin while they wait make a step several times slower on a machine
    # whose cores are shared with engines.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    key = bytes.fromhex(os.environ[commands.KEY_VARIABLE])
    with Client(arguments.socket, family="AF_UNIX", authkey=key) as connection:
        connection.send(commands.Hello(arguments.rank, os.getpid()))
        from services.trainer.ranks.worker import RankWorker

        worker = RankWorker(arguments.rank, arguments.world_size, arguments.master_address, arguments.master_port)
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
