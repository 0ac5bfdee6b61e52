"""The contract's tests as a command against a server that is given."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.buffer_world import Store, kill, start_server
from services.common.process import free_port
from tetrarch_contract.report import sentence


def contract(*arguments: str) -> subprocess.CompletedProcess:
    """Runs the command."""
    command = [sys.executable, "-m", "tetrarch_contract", "buffer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


async def test_clauses_are_checked_against_a_given_server(tmp_path):
    store = await Store(tmp_path / "store").start()
    server, port = await start_server(store.url, tmp_path)
    try:
        result = contract("--target", f"127.0.0.1:{port}", "-k", "the same request or forgot the scripts")
    finally:
        await kill(server)
        await store.kill()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "  ok        The same request gets the same leases.\n" in result.stdout
    assert "  left out  A store that forgot the scripts is taught again: needs control of" in result.stdout
    assert result.stdout.endswith("1 ok, 0 FAILED, 1 left out.\n")


def test_a_server_that_is_not_there_is_named():
    target = f"127.0.0.1:{free_port()}"
    result = contract("--target", target)
    assert result.returncode == 2
    assert result.stderr == f"tetrarch_contract: {target} does not answer: UNAVAILABLE.\n"


def test_a_clause_is_the_sentence_of_its_test():
    assert sentence("a/test_b.py::test_stale_groups_never_reach_the_trainer[drop]") == (
        "Stale groups never reach the trainer (drop)"
    )
