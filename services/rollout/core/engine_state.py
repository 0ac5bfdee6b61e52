"""The life of an engine as a pure state machine.

`STARTING → STALE → READY ⇄ UPDATING`, `→ DRAINING`, `→ DEAD → STARTING`. It knows no process, router or clock.

Invariants: READY is reached only through a verified update (UPDATING → READY) or by giving up an update that
had not touched the weights; whatever else happens to the weights leads to STALE.
"""

from __future__ import annotations

import enum


class EngineState(enum.IntEnum):
    """State of an engine; numbers equal the proto's."""

    STARTING = 1
    STALE = 2
    READY = 3
    UPDATING = 4
    DRAINING = 5
    DEAD = 6


class EngineEvent(enum.Enum):
    """What can happen to an engine."""

    CAME_UP = "came up"
    UPDATE_BEGAN = "update began"
    COMMITTED = "committed"
    UNTOUCHED = "update given up before any byte arrived"
    INVALIDATED = "weights are no verified version"
    DRAINED = "is to stop"
    DIED = "died"
    STARTED = "process started"


_TABLE: dict[tuple[EngineState, EngineEvent], EngineState] = {
    (EngineState.STARTING, EngineEvent.CAME_UP): EngineState.STALE,
    (EngineState.STALE, EngineEvent.UPDATE_BEGAN): EngineState.UPDATING,
    (EngineState.READY, EngineEvent.UPDATE_BEGAN): EngineState.UPDATING,
    (EngineState.UPDATING, EngineEvent.COMMITTED): EngineState.READY,
    (EngineState.UPDATING, EngineEvent.UNTOUCHED): EngineState.READY,
    (EngineState.UPDATING, EngineEvent.INVALIDATED): EngineState.STALE,
    (EngineState.READY, EngineEvent.INVALIDATED): EngineState.STALE,
    (EngineState.STALE, EngineEvent.INVALIDATED): EngineState.STALE,
    (EngineState.DEAD, EngineEvent.STARTED): EngineState.STARTING,
}
_ALIVE = (EngineState.STARTING, EngineState.STALE, EngineState.READY, EngineState.UPDATING)
_TABLE |= {(state, EngineEvent.DRAINED): EngineState.DRAINING for state in _ALIVE}
_TABLE |= {(state, EngineEvent.DIED): EngineState.DEAD for state in EngineState}


class TransitionError(RuntimeError):
    """An event that cannot happen in this state: a programmer's error."""


def next_state(state: EngineState, event: EngineEvent) -> EngineState:
    """State after an event. Raises TransitionError when the event cannot happen in `state`."""
    try:
        return _TABLE[state, event]
    except KeyError:
        raise TransitionError(f"an engine that is {state.name} cannot see {event.name}") from None
