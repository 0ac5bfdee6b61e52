"""The operator's window: command line and supervisor of one machine. A gRPC client of the other services."""
