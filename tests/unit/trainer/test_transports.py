"""Collective or files: what was wanted, and what failures change, once."""

from __future__ import annotations

import pytest

from services.trainer.core.records import EngineState, EngineView
from services.trainer.core.transports import Transports


def engine(engine_id: str = "n-0", incarnation: str = "a") -> EngineView:
    return EngineView(
        engine_id=engine_id,
        address="127.0.0.1:1",
        incarnation=incarnation,
        state=EngineState.READY,
        weight_version=1,
        rank_count=1,
        backends=("gloo",),
    )


def test_without_a_directory_nothing_ever_changes():
    transports = Transports(prefer_files=False, have_files=False)
    for _ in range(5):
        assert transports.failed(engine(), "INCOMPATIBLE", "no") == ""
    assert not transports.by_files(engine())


def test_a_collective_that_breaks_twice_gives_way_to_files_and_that_is_said_once():
    transports = Transports(prefer_files=False, have_files=True)
    assert transports.failed(engine(), "TRANSFER_FAILED", "cut") == ""
    transports.succeeded(engine())
    assert transports.failed(engine(), "TRANSFER_FAILED", "cut") == ""
    said = transports.failed(engine(), "TRANSFER_FAILED", "cut again")
    assert said == "engine n-0 gets its weights in files from now on: cut again"
    assert transports.by_files(engine())
    assert not transports.by_files(engine("n-1"))
    for _ in range(5):
        assert transports.failed(engine(), "FILES_MISSING", "no such directory") == ""
    assert transports.by_files(engine())


def test_a_group_that_can_never_be_made_gives_way_at_once():
    transports = Transports(prefer_files=False, have_files=True)
    assert "in files" in transports.failed(engine(), "INCOMPATIBLE", "NCCL differs")


@pytest.mark.parametrize("reason", ["FENCED", "ENGINE_UNAVAILABLE", "RUN_NOT_SERVED"])
def test_what_says_nothing_about_the_way_changes_nothing(reason):
    transports = Transports(prefer_files=False, have_files=True)
    for _ in range(5):
        assert transports.failed(engine(), reason, "gone") == ""
    assert not transports.by_files(engine())


@pytest.mark.parametrize("reason", ["BASE_MISMATCH", "FILES_CORRUPT"])
def test_an_engine_that_cannot_use_a_delta_gets_full_files_then_the_collective(reason):
    transports = Transports(prefer_files=True, have_files=True)
    assert transports.failed(engine(), reason, "not my base") == "engine n-0 gets full files: not my base"
    assert transports.wants_full(engine())
    transports.succeeded(engine())
    assert not transports.wants_full(engine())
    transports.failed(engine(), reason, "again")
    assert transports.failed(engine(), reason, "again") == ""
    assert transports.failed(engine(), reason, "still") == (
        "engine n-0 gets its weights over a collective from now on: still"
    )
    assert not transports.by_files(engine())


def test_a_directory_that_a_node_does_not_see_gives_way_at_once_and_a_new_process_tries_it_again():
    transports = Transports(prefer_files=True, have_files=True)
    assert "over a collective" in transports.failed(engine(), "FILES_MISSING", "no such directory")
    assert transports.by_files(engine(incarnation="b"))
    transports.keep([engine(incarnation="b")])
    assert transports.by_files(engine())
