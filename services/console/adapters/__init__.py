"""The outside world of the console: services over gRPC, the Valkey binary, charts."""
