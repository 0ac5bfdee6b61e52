"""The trainer's outside world: rank processes, buffer, rollout nodes, files."""
