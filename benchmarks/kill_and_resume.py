"""`python -m benchmarks.kill_and_resume`: SIGKILL every process in mid-epoch, run the command again, count.

Every prompt of the epoch must have been trained exactly once in the surviving history.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from rich.console import Console
from tetrarch.buffer.v1 import buffer_service_pb2, buffer_service_pb2_grpc, run_pb2

from benchmarks.report import Figure, finish, parser
from benchmarks.workspace import fresh_id, history_of, sft_workspace, train
from examples.first_run.__main__ import ROOT, Workspace
from services.common.channel import open_channel
from services.console.cli.places import services_to_read
from services.console.core.history import METRICS_FILE
from services.console.state import StateDir

PROMPTS, BATCH, SAVE_INTERVAL, KILL_AFTER = 192, 16, 3, 7
DEADLINE = 300.0


def kill_after(arguments: list[str], run_dir: Path, steps: int, log: Path) -> int:
    """Starts a run and SIGKILLs all its processes by pid once `steps` steps are done; → how many processes."""
    with log.open("a") as out:
        command = [sys.executable, "-m", "services.console", *arguments]
        parent = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and parent.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if len(history_of(run_dir).steps) >= steps:
                break
        time.sleep(0.05)
    else:
        raise SystemExit(f"The run did not reach step {steps}; see {log}.")
    victims = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(victim.pid, signal.SIGKILL)
    parent.wait()
    return len(victims)


def resumed_from(run_dir: Path) -> int:
    """Steps in the checkpoint that the second command went on from."""
    rows = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]
    return int([row["step_count"] for row in rows if row["kind"] == "restore"][-1])


async def trained_rows(workspace: Workspace, run_id: str) -> collections.Counter[int]:
    """How often every row of the data was trained, as the buffer has it."""
    rows: collections.Counter[int] = collections.Counter()
    async with (
        services_to_read(StateDir(workspace.state), None, None, Console(quiet=True)) as place,
        open_channel(place.addresses["buffer"], "buffer") as channel,
    ):
        stub = buffer_service_pb2_grpc.BufferServiceStub(channel)
        token = ""
        while True:
            page = await stub.ListGroups(
                buffer_service_pb2.ListGroupsRequest(
                    run_id=run_id, states=[run_pb2.GROUP_STATE_CONSUMED], page_size=500, page_token=token
                )
            )
            for info in page.groups:
                group = await stub.GetGroup(buffer_service_pb2.GetGroupRequest(run_id=run_id, group_id=info.group_id))
                rows[group.prompt.row] += 1
            token = page.next_page_token
            if not token:
                return rows


def main() -> int:
    """Command line entry."""
    chosen = parser(__doc__).parse_args()
    workspace = sft_workspace(1)
    run_id = fresh_id(workspace, "resume")
    subset = workspace.path / "data" / f"{run_id}.jsonl"
    subset.write_text("".join((workspace.path / "data" / "train.jsonl").open().readlines()[:PROMPTS]))
    flags = ["--prompt-data", str(subset), "--num-epoch", "1", "--num-rollout", str(PROMPTS // BATCH)]
    flags += ["--rollout-batch-size", str(BATCH), "--save-interval", str(SAVE_INTERVAL), "--max-staleness", "1"]
    arguments = workspace.grpo(run_id, *flags, "--eval-interval", str(PROMPTS // BATCH))
    run_dir, log = workspace.path / run_id, workspace.path / f"{run_id}.log"
    killed = kill_after(arguments, run_dir, KILL_AFTER, log)
    done_before = len(history_of(run_dir).steps)
    resumed = train(workspace, arguments, run_id)
    first = resumed_from(run_dir)
    rows = asyncio.run(trained_rows(workspace, run_id))
    figures = [
        Figure("processes killed by SIGKILL", killed, "", ">= 6"),
        Figure("steps done at the kill", done_before, "", f">= {KILL_AFTER}"),
        Figure("step it went on from (a checkpoint)", first, "", ">= 1"),
        Figure("steps at the end", len(resumed.history.steps), "", f"== {PROMPTS // BATCH}"),
        Figure("prompts of the epoch", PROMPTS),
        Figure("prompts trained once", sum(count == 1 for count in rows.values()), "", f"== {PROMPTS}"),
        Figure("prompts trained more than once", sum(count > 1 for count in rows.values()), "", "== 0"),
        Figure("prompts never trained", PROMPTS - len(rows), "", "== 0"),
        Figure("command again, to the end", resumed.seconds, "s"),
    ]
    return finish("kill_and_resume", figures, chosen.json)


if __name__ == "__main__":
    raise SystemExit(main())
