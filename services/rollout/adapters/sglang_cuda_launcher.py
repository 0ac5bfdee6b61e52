"""Starts the unmodified SGLang server on CUDA with bounded waits for weight groups.

    python -m services.rollout.adapters.sglang_cuda_launcher --model-path DIR ...

takes the arguments of `sglang.launch_server`. Groups that SGLang joins wait half an hour for a missing member by
default, and the scheduler stands still that long. TETRARCH_GROUP_TIMEOUT_SECONDS bounds it: a meeting in vain is given
up and the engine serves again. A broadcast that began and whose bytes never come is not bounded: NCCL cannot take a
kernel back, only the end of the process can. Knows nothing of the node.

Invariant: SGLang's workers are spawned and run this module's top level again, as `__mp_main__`, before anything of
SGLang is imported there: the bound holds in them.
"""

from __future__ import annotations

import datetime
import os
import runpy

from torch.distributed import distributed_c10d

_SECONDS = os.environ.get("TETRARCH_GROUP_TIMEOUT_SECONDS")
if _SECONDS:
    distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=float(_SECONDS))


if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
