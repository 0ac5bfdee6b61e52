"""The engine's state machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.core.engine_state import EngineEvent, EngineState, TransitionError, next_state


def test_the_way_of_an_update():
    state = EngineState.STARTING
    for event, expected in (
        (EngineEvent.CAME_UP, EngineState.STALE),
        (EngineEvent.UPDATE_BEGAN, EngineState.UPDATING),
        (EngineEvent.COMMITTED, EngineState.READY),
        (EngineEvent.UPDATE_BEGAN, EngineState.UPDATING),
        (EngineEvent.INVALIDATED, EngineState.STALE),
        (EngineEvent.DIED, EngineState.DEAD),
        (EngineEvent.STARTED, EngineState.STARTING),
    ):
        state = next_state(state, event)
        assert state is expected


@given(st.lists(st.sampled_from(list(EngineEvent)), max_size=30))
def test_ready_is_reached_only_from_updating(events):
    state = EngineState.DEAD
    for event in events:
        try:
            after = next_state(state, event)
        except TransitionError:
            continue
        if after is EngineState.READY:
            assert state is EngineState.UPDATING
            assert event in (EngineEvent.COMMITTED, EngineEvent.UNTOUCHED)
        state = after


def test_an_impossible_event_is_a_programmers_error():
    with pytest.raises(TransitionError, match="DEAD cannot see COMMITTED"):
        next_state(EngineState.DEAD, EngineEvent.COMMITTED)
