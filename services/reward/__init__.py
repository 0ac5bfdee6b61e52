"""The reward service: scores samples with built-in graders or a function of the user."""
