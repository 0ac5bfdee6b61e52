"""Pure logic of the console: run files, flags, checks, reports. No gRPC, no terminal."""
