"""Deadlines and places of the controller, apart from what a run says itself. Seconds throughout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoopSettings:
    """`address` is where engines reach rank 0; `device` is "cpu" or "cuda"."""

    buffer_address: str
    address: str
    device: str
    setup_timeout: float
    step_timeout: float
    save_timeout: float
    engines_timeout: float
    eval_timeout: float
    take_wait: float = 2.0
    """One long poll for a batch; between two of them the loop looks at its ranks and at requests to stop."""
    join_timeout: float = 15.0
    """Most seconds for the members of a weight group to meet; a run's update_timeout may be shorter."""
