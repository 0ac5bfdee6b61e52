"""An engine's side of weight groups, with nothing of ours in it."""

from __future__ import annotations

import datetime
import hashlib

import torch
from torch.distributed import distributed_c10d


def stand_in_engine(ports: dict[str, int], sizes: list[int]) -> list[str]:
    """Joins as SGLang does; leaves "broken" after the first bucket and never joins "absent"."""
    members = {}
    timeout = datetime.timedelta(seconds=20)
    for name in ("good", "broken"):
        store, _, _ = next(distributed_c10d.rendezvous(f"tcp://127.0.0.1:{ports[name]}", 1, 2, timeout=timeout))
        store = distributed_c10d.PrefixStore(name, store)
        backend = distributed_c10d.Backend("gloo")
        members[name], _ = distributed_c10d._new_process_group_helper(
            2, 1, [], backend, store, group_name=name, timeout=timeout
        )
        distributed_c10d._world.pg_group_ranks[members[name]] = {0: 0, 1: 1}
    received = []
    for index, size in enumerate(sizes):
        for name, group in list(members.items()):
            options = torch.distributed.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            bucket = torch.empty(size, dtype=torch.uint8)
            group.broadcast([bucket], options).wait()
            if name == "good":
                received.append(hashlib.sha256(bucket.numpy()).hexdigest())
        if index == 0:
            torch.distributed.destroy_process_group(members.pop("broken"))
    return received
