"""The outside world of the buffer: the store, data files and tokenizers."""
