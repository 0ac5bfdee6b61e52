"""The language model: Hugging Face configuration and weights on one side, megatron-core's GPTModel on the other."""
