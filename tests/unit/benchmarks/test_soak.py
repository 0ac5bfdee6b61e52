"""What the soak's verdicts find, and what its deck deals."""

import random
from collections import Counter

import pytest
from tetrarch.buffer.v1 import run_pb2

from benchmarks.soak_strikes import TIERS, Deck
from benchmarks.soak_verdict import Step, ledger_of, progress_of, published_versions, verified_versions, versions_of

CONSUMED, LEASED, EVICTED = run_pb2.GROUP_STATE_CONSUMED, run_pb2.GROUP_STATE_LEASED, run_pb2.GROUP_STATE_EVICTED


def row(ordinal: int, versions: list[list[int]]) -> dict:
    """A sample of two prompt tokens and four response tokens."""
    return {
        "group_id": f"r-{ordinal}",
        "ordinal": ordinal,
        "prompt": f"question {ordinal % 8}",
        "prompt_length": 2,
        "tokens": [1] * 6,
        "versions": versions,
    }


def step(number: int, *ordinals: int, versions: tuple = ((1, 0, 4),)) -> Step:
    """A step of groups of one sample."""
    return Step(number, {f"r-{o}": [row(o, [list(span) for span in versions])] for o in ordinals})


def groups(*told: tuple[int, int, int | None]) -> list[run_pb2.GroupInfo]:
    """(ordinal, state, step) as the buffer tells."""
    return [run_pb2.GroupInfo(group_id=f"r-{o}", ordinal=o, state=state, step=s) for o, state, s in told]


def history(*events: tuple[str, int, int]) -> list[dict]:
    """(kind, step, version) as in metrics.jsonl, a second each."""
    return [{"kind": kind, "step": s, "policy_version": v, "time": float(t)} for t, (kind, s, v) in enumerate(events)]


def test_a_clean_ledger():
    stats = run_pb2.RunStats(drawn_count=6, row_count=8)
    told = groups((0, CONSUMED, 0), (1, CONSUMED, 0), (2, CONSUMED, 1), (3, CONSUMED, 1), (4, LEASED, None),
                  (5, EVICTED, None))  # fmt: skip
    ledger = ledger_of(stats, told, [step(0, 0, 1), step(1, 2, 3)], batch=2)
    assert (ledger.drawn, ledger.trained, ledger.evicted, ledger.in_hand) == (6, 4, 1, 1)
    assert not ledger.lost
    assert not ledger.duplicated
    assert not ledger.contradictions


@pytest.mark.parametrize(
    ("told", "steps", "lost", "duplicated", "contradictions"),
    [
        (((0, CONSUMED, 0),), (step(0, 0),), 1, 0, 1),  # ordinal 1 is nowhere, and the step has one group only
        (((0, CONSUMED, 0), (1, CONSUMED, 0), (0, CONSUMED, 1)), (step(0, 0, 1),), 0, 1, 1),
        (((0, CONSUMED, 0), (1, CONSUMED, 0)), (step(0, 0, 1), step(1, 0, 1)), 0, 2, 1),
        (((0, CONSUMED, 0), (1, CONSUMED, 0)), (step(0, 0, 2),), 0, 0, 1),
        (((0, CONSUMED, 0), (1, LEASED, None)), (step(0, 0, 1),), 0, 0, 1),
    ],
)
def test_what_the_ledger_finds(told, steps, lost, duplicated, contradictions):
    ledger = ledger_of(run_pb2.RunStats(drawn_count=2, row_count=8), groups(*told), steps, batch=2)
    assert len(ledger.lost) == lost
    assert len(ledger.duplicated) == duplicated
    assert len(ledger.contradictions) == contradictions


def test_a_prompt_asked_twice_in_an_epoch_is_found():
    twice = {f"r-{o}": [row(o, []) | {"prompt": "the same"}] for o in (0, 1)}
    told = groups((0, CONSUMED, 0), (1, CONSUMED, 0))
    ledger = ledger_of(run_pb2.RunStats(drawn_count=2, row_count=8), told, [Step(0, twice)], batch=2)
    assert ledger.duplicated == ["the same in r-0 and r-1"]


EVENTS = history(
    ("update_weights", -1, 1), ("update_weights", 0, 2), ("step", 0, 2), ("update_weights", 1, 3), ("step", 1, 3),
    ("restore", 0, 0), ("update_weights", 0, 4), ("update_weights", 1, 5), ("step", 1, 5), ("update_weights", 2, 6),
    ("step", 2, 6),
)  # fmt: skip


def test_versions_of_a_run_that_was_restored():
    assert published_versions(EVENTS) == [1, 2, 3, 4, 5, 6]
    # Step 1 was trained again: its batch was taken at version 4, step 2's at 5.
    steps = [step(0, 0), step(1, 1, versions=((3, 0, 2), (4, 2, 4))), step(2, 2, versions=((4, 0, 4),))]
    found = versions_of(EVENTS, steps, {1, 2, 3, 4, 5, 6}, max_staleness=1)
    assert found.by_lag == {0: 6, 1: 6}
    assert (found.tokens, found.unverified, found.too_new, found.too_old, found.unlabelled) == (12, 0, 0, 0, 0)
    assert not found.went_back


@pytest.mark.parametrize(
    ("versions", "counted"),
    [
        (((2, 0, 4),), {"too_old": 4}),
        (((5, 0, 1), (4, 1, 4)), {"too_new": 1}),
        (((3, 0, 3),), {"unlabelled": 1, "unverified": 3}),
    ],
)
def test_what_the_versions_find(versions, counted):
    found = versions_of(EVENTS, [step(1, 1, versions=versions)], {1, 2, 4, 5, 6}, max_staleness=1)
    bad = {name: getattr(found, name) for name in ("unverified", "too_new", "too_old", "unlabelled")}
    assert {name: value for name, value in bad.items() if value} == counted


def test_numbers_that_a_restart_of_the_store_skipped_make_no_token_older():
    events = history(("update_weights", -1, 3), ("update_weights", 0, 1500), ("step", 0, 1500),
                     ("update_weights", 1, 1501), ("step", 1, 1501))  # fmt: skip
    assert versions_of(events, [step(1, 1, versions=((3, 0, 4),))], {3, 1500}, max_staleness=1).too_old == 0


def test_a_version_that_goes_back_is_found():
    events = history(("update_weights", -1, 2), ("update_weights", 0, 1), ("step", 0, 1))
    assert versions_of(events, [], set(), max_staleness=1).went_back == ["2 to 1"]


def test_verified_versions_are_read_from_the_nodes_log(tmp_path):
    log = tmp_path / "rollout.log"
    log.write_text(
        "13:20:46 [info     ] weights committed    engine=local-0 module=m stood_still=0.405 version=52\n"
        "13:20:47 [info     ] engine state         before=UPDATING engine=local-1 now=READY version=53\n"
    )
    assert verified_versions(log) == {52}


def test_repeated_steps_are_counted():
    assert progress_of(EVENTS).repeated == 1
    assert progress_of(EVENTS).steps == 3


def test_a_deck_deals_every_tier_and_repeats_with_its_seed():
    def deal() -> list:
        deck = Deck(random.Random(7))
        return [deck.draw(lambda _: True) for _ in range(40)]

    cards = deal()
    assert cards == deal()
    assert set(TIERS) == {card.tier for card in cards}
    by_tier = Counter(card.tier for card in cards)
    assert by_tier["engine"] >= 10
    assert Deck(random.Random(7)).draw(lambda tier: tier == "rank").tier == "rank"
    assert Deck(random.Random(7)).draw(lambda _: False) is None


def test_a_tier_that_must_wait_keeps_no_other_from_its_turn():
    deck = Deck(random.Random(7))
    assert "engine" not in {deck.draw(lambda tier: tier != "engine").tier for _ in range(100)}
    assert {deck.draw(lambda tier: tier == "engine").tier for _ in range(30)} == {"engine"}
