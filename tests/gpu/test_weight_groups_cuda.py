"""Weight groups over NCCL: trainer on the first GPU, members on the second. Needs two GPUs."""

from __future__ import annotations

import os

import pytest
import torch

from services.common.devices import COLLECTIVE_ENV
from services.trainer.ranks.groups import NCCL_WATCHDOG_OFF
from tests.support.weight_group_scenarios import SCENARIOS, Place, arrives

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(autouse=True, scope="module")
def _environment():
    """Of a rank."""
    before = dict(os.environ)
    os.environ.update({**COLLECTIVE_ENV, **NCCL_WATCHDOG_OFF})
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_over_nccl(scenario):
    scenario(Place("nccl", "cuda:0", "cuda:1", 2_000_000_000))


@pytest.mark.timeout(120)
def test_a_gloo_group_takes_a_bucket_from_the_gpu_by_way_of_the_host():
    place = Place("gloo", "cuda:0", "cpu", 64_000_000)
    groups = place.groups()
    with place.members(groups) as (member,):
        arrives(groups, member, place.data())
