"""`python -m tetrarch_contract SERVICE --target host:port`: every clause of a service's contract, ok or failed.

The clauses are the very tests of tests/contract/SERVICE_v1; run by pytest they start a server of ours, run by this
command they talk to the one that is given. Each makes a run of its own and deletes it. What needs control of the
server's store or process is left out, by name. A server reads the prompts from files that this command writes: both
must see `--data-dir` under the same path. Nodes that serve the same buffer would take the runs for work: use one
without.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
from pathlib import Path

import pytest

from services.common.healthcheck import check
from tetrarch_contract.report import Report

SERVICES = {"buffer": ("buffer_v1", "tetrarch.buffer.v1.BufferService")}
TESTS = Path(__file__).resolve().parents[1] / "tests" / "contract"


def arguments() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="tetrarch_contract", description="Checks a server against its contract.")
    parser.add_argument("service", choices=sorted(SERVICES))
    parser.add_argument("--target", required=True, metavar="HOST:PORT", help="gRPC address of the server")
    parser.add_argument("--run-prefix", default="", help="beginning of the ids of its runs; by default a random one")
    parser.add_argument("--data-dir", type=Path, help="directory that the server reads too; by default a temporary one")
    parser.add_argument("-k", dest="only", default="", help="only clauses whose name contains this")
    return parser


def main() -> int:
    """Exit status: 0 all clauses hold, 1 one does not, 2 the server cannot be reached."""
    chosen = arguments().parse_args()
    folder, service = SERVICES[chosen.service]
    if problem := check(chosen.target, service):
        print(f"tetrarch_contract: {problem}", file=sys.stderr)
        return 2
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    with tempfile.TemporaryDirectory(prefix="tetrarch-contract-") as temporary:
        base = (chosen.data_dir or Path(temporary)).absolute() / "files"
        report = Report(chosen.target, chosen.run_prefix or f"contract-{secrets.token_hex(3)}")
        options = ["-o", "addopts=--import-mode=importlib", "-p", "no:terminal", f"--basetemp={base}"]
        only = ["-k", _names(chosen.only)] if chosen.only else []
        status = pytest.main([str(TESTS / folder), *options, *only], plugins=[report])
    print(report.summary())
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        print("tetrarch_contract: no clause has such a name.", file=sys.stderr)
    return 0 if status == pytest.ExitCode.OK else 1


def _names(words: str) -> str:
    """pytest's expression for parts of sentences joined by " or "."""
    return " or ".join(part.strip().lower().replace(" ", "_") for part in words.split(" or "))


if __name__ == "__main__":
    raise SystemExit(main())
