"""`python -m benchmarks.million_rows`: a data file of a million rows behind a real buffer server on a real store.

Measures the time from CreateRun to the first leased prompt, the server's resident memory, and leases of single prompts
across the shuffled file; then a second server on the same store must give the same prompts. `--format parquet` does
the same with row groups of 10,000 rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

from tetrarch.buffer.v1 import buffer_service_pb2 as pb

from benchmarks.buffer_world import Client, Store, start_server, workspace, write_data
from benchmarks.report import Figure, finish, parser
from services.common.channel import open_channel
from services.common.process import ManagedProcess

_LEASES = 1000
_CHECKED = 50
_GROUP_ROWS = 10_000
_QUESTION = (
    "A carpenter cuts board number {row} into {parts} equal parts and paints every second one; each painted part needs"
    " {paint} ml of paint. How much paint does the carpenter need in all, and how many parts stay bare?"
)


def row(number: int) -> dict[str, object]:
    """A row like those of public sets: a question, an answer, an object of metadata."""
    parts, paint = 2 + number % 97, 5 + number % 41
    question = _QUESTION.format(row=number, parts=parts, paint=paint)
    return {"input": question, "label": str(parts // 2 * paint), "metadata": {"row": number, "source": "benchmark"}}


def write_rows(path: Path, count: int) -> None:
    """The data file, by its suffix."""
    if path.suffix == ".jsonl":
        with path.open("w") as out:
            out.writelines(json.dumps(row(number)) + "\n" for number in range(count))
        return
    import pyarrow
    from pyarrow import parquet

    writer = None
    for start in range(0, count, _GROUP_ROWS):
        table = pyarrow.Table.from_pylist([row(number) for number in range(start, min(start + _GROUP_ROWS, count))])
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer:
        writer.close()


def resident_mb(process: ManagedProcess, field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of a process in MB (10^6 bytes)."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024 / 1e6


async def measure(directory: Path, chosen: argparse.Namespace) -> tuple[list[Figure], dict[str, object]]:
    """Figures and context."""
    _, checkpoint = write_data(directory, 1)
    data = directory / f"rows.{chosen.format}"
    write_rows(data, chosen.rows)
    store = await Store(directory / "store").start()
    server, port = await start_server(store.url, directory)
    empty = resident_mb(server, "VmRSS")
    async with open_channel(f"127.0.0.1:{port}", "buffer") as channel:
        client = Client(channel, "million")
        keys = {
            "data": {"metadata_key": "metadata", "rollout_shuffle": True, "rollout_max_prompt_len": 4096},
            "rollout": {"rollout_batch_size": 2 * _LEASES},
        }
        began = time.perf_counter()
        await client.create(data, checkpoint, **keys)
        created = time.perf_counter() - began
        await client.session()
        await client.publish(0)
        first = (await client.lease(1)).leases
        first_lease = time.perf_counter() - began
        after_first = resident_mb(server, "VmRSS")
        seconds, leases = [], list(first)
        for _ in range(_LEASES):
            began = time.perf_counter()
            leases += (await client.lease(1, ttl=600)).leases
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        leases += (await client.lease(_CHECKED, ttl=600)).leases
        together = (time.perf_counter() - began) / _CHECKED
        peak = resident_mb(server, "VmHWM")
    await server.stop(2)
    again, other_seconds, differing = await second_server(store, directory, leases)
    await again.stop(2)
    await store.process.stop(2)
    rows = [lease.prompt.row for lease in leases]
    cuts = statistics.quantiles(seconds, n=100)
    figures = [
        Figure("first lease after CreateRun began", first_lease, "s", "<= 5"),
        Figure("peak resident memory of the server", peak, "MB", "<= 300"),
        Figure("prompts leased", len(leases), bar=f"== {1 + _LEASES + _CHECKED}"),
        Figure("rows leased twice", len(rows) - len(set(rows)), bar="== 0"),
        Figure("prompts that a second server gives otherwise", differing, bar="== 0"),
        Figure("CreateRun", created, "s"),
        Figure("resident memory before the run", empty, "MB"),
        Figure("resident memory after the first lease", after_first, "MB"),
        Figure("lease of one prompt, p50", 1e3 * cuts[49], "ms"),
        Figure("lease of one prompt, p99", 1e3 * cuts[98], "ms"),
        Figure(f"a prompt of a lease of {_CHECKED}", 1e3 * together, "ms"),
        Figure("first prompt from a second server", other_seconds, "s"),
    ]
    spread = (max(rows) - min(rows)) / chosen.rows
    return figures, {"rows": chosen.rows, "bytes": data.stat().st_size, "format": chosen.format, "spread": spread}


async def second_server(
    store: Store, directory: Path, leases: list[pb.PromptLease]
) -> tuple[ManagedProcess, float, int]:
    """(another server on the same store, seconds to its first prompt, prompts it gives otherwise)."""
    server, port = await start_server(store.url, directory)
    differing, first = 0, 0.0
    async with open_channel(f"127.0.0.1:{port}", "buffer") as channel:
        client = Client(channel, "million")
        began = time.perf_counter()
        for lease in leases[:: max(1, len(leases) // _CHECKED)]:
            found = (await client.call("GetGroup", group_id=lease.prompt.group_id)).prompt
            first = first or time.perf_counter() - began
            differing += found != lease.prompt
    return server, first, differing


def main() -> int:
    """Exit status."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    arguments.add_argument("--directory", type=Path, help="keep data, logs and store here")
    chosen = arguments.parse_args()
    with workspace(chosen.directory) as directory:
        figures, context = asyncio.run(measure(directory, chosen))
    return finish("million_rows", figures, chosen.json, **context)


if __name__ == "__main__":
    raise SystemExit(main())
