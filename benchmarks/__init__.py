"""Commands that measure.

`python -m benchmarks.NAME [--json FILE]` prints every figure beside its bar and fails when one falls short.
"""

import os

# Before anything imports grpc: benchmarks start children from processes with channels, and kill servers on purpose.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
