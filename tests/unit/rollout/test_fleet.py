"""Who is behind the router."""

from types import SimpleNamespace

import pytest

from services.rollout.core.engine_port import EngineInfo
from services.rollout.core.engine_state import EngineState
from services.rollout.core.fleet import Fleet

INFO = EngineInfo("simulated", "", "", "", ("gloo",), {}, vocab_size=64, context_length=64, rank_count=1, max_running=8)


class SlowRouter:
    """Holds workers; something happens while one is added."""

    url = "http://127.0.0.1:9"

    def __init__(self):
        self.workers, self.meanwhile = set(), lambda: None

    async def add_worker(self, url, limits):
        self.workers.add(url)
        self.meanwhile()

    async def remove_worker(self, url):
        self.workers.discard(url)


@pytest.mark.parametrize("change", [{}, {"state": EngineState.DEAD}, {"engine": SimpleNamespace(url="http://new")}])
async def test_an_engine_that_is_lost_while_it_is_routed_does_not_stay_behind_the_router(change):
    fleet = Fleet("n", 1, SlowRouter())
    (slot,) = fleet.slots
    slot.state, slot.info, slot.engine = EngineState.READY, INFO, SimpleNamespace(url="http://old")
    fleet.router.meanwhile = lambda: vars(slot).update(change)
    await fleet.route(slot)
    assert fleet.router.workers == ({"http://old"} if not change else set())
    assert fleet.serving is not bool(change)
    slot.state, fleet.router.meanwhile = EngineState.READY, lambda: None
    await fleet.route(slot)
    assert fleet.router.workers == {slot.engine.url}


def test_the_oldest_version_a_request_can_meet():
    fleet = Fleet("n", 3, SlowRouter())
    assert fleet.oldest_version() is None
    fleet._routed.update(("n-0", "n-1"))
    fleet.slots[0].version, fleet.slots[1].version, fleet.slots[2].version = 5, 4, 1
    assert fleet.oldest_version() == 4
    # It receives version 6: paused, with no version of its own, it answers no request before 6 serves.
    fleet.slots[1].version, fleet.slots[1].incoming = 0, 6
    assert fleet.oldest_version() == 5
    fleet.slots[0].version, fleet.slots[0].incoming = 0, 6
    assert fleet.oldest_version() == 6
