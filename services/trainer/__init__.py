"""The trainer tier: a controller that speaks gRPC, and the Megatron ranks that it owns."""
