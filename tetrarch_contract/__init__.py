"""The contract's tests as a command for any implementation: `python -m tetrarch_contract buffer --target host:port`."""
