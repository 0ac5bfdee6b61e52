"""Pure logic of the buffer: what a run asks for, ids, shuffles, waiting. Knows no gRPC and no store."""
