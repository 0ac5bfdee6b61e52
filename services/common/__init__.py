"""What every tier shares: errors, records, settings, servers, channels. Knows no tier and no ML library."""

import os

# gRPC's fork handlers abort a child between fork and exec when the parent is answering calls at that moment
# (measured: 17 of 60 children). Children of ours always exec, so they need no handlers. Read when grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
