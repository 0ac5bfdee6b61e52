"""What Tetrarch's own reward service adds: graders of the user that fail, hang or crash cost only their own items."""

from __future__ import annotations

import threading
import time

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tetrarch.reward.v1 import reward_service_pb2 as pb

from services.common.channel import service_error


def score(own, ids, *, budget=20.0, label="1", response="1", metadata="", **fields):
    duration = Duration()
    duration.FromMilliseconds(int(budget * 1000))
    items = [pb.ScoreItem(item_id=i, response=response, label=label, metadata_json=metadata) for i in ids]
    return own.stub.Score(pb.ScoreRequest(items=items, budget=duration, **fields)).results


def error_of(own, ids=(), **fields):
    with pytest.raises(grpc.RpcError) as caught:
        score(own, ids, **fields)
    return service_error(caught.value)


def custom(name):
    return {"grader": "custom", "custom_path": f"user_rewards.{name}"}


def summary(results):
    return [r.reward if r.HasField("reward") else r.unscored_reason for r in results]


def test_a_troubled_function_costs_only_its_own_items(own):
    results = score(own, ["a", "crash", "hang", "raise", "nan", "b", "c"], **custom("troubled"))
    assert summary(results) == [1.0, "GRADER_ERROR", "TIMEOUT", "GRADER_ERROR", "INVALID_REWARD", 1.0, 1.0]
    assert "no mood" in results[3].message
    assert summary(score(own, ["a", "b"], **custom("troubled"))) == [1.0, 1.0]


def test_async_functions_run_at_the_same_time(own):
    score(own, [], **custom("judge"))
    score(own, ["warm"], metadata='{"weight": 1}', **custom("judge"))
    started = time.monotonic()
    results = score(own, [str(i) for i in range(30)], metadata='{"weight": 2}', **custom("judge"))
    assert summary(results) == [2.0] * 30
    assert time.monotonic() - started < 3  # one after another they would take 9 s


def test_a_blocked_loop_costs_only_the_item_that_blocks(own):
    assert summary(score(own, ["a", "hang", "b"], **custom("stuck"))) == [1.0, "TIMEOUT", 1.0]


def test_the_budget_is_kept(own):
    score(own, ["warm"], **custom("stuck"))
    started = time.monotonic()
    assert summary(score(own, ["a", "slow"], budget=1.0, **custom("stuck"))) == [1.0, "TIMEOUT"]
    assert time.monotonic() - started < 1.5


def test_a_hanging_grader_does_not_hold_up_others(own):
    score(own, ["warm"], **custom("troubled"))
    hanging = threading.Thread(target=score, args=(own, ["hang"]), kwargs=custom("troubled"))
    hanging.start()
    time.sleep(0.2)
    assert summary(score(own, ["a"], grader="exact_match")) == [1.0]
    assert summary(score(own, ["a"], grader="math")) == [1.0]
    assert hanging.is_alive()
    hanging.join()


def test_grouped_functions_get_all_items(own):
    assert summary(score(own, ["a", "b", "c"], grouped=True, **custom("grouped"))) == [3.0] * 3


def test_metadata_may_name_the_grader(own):
    assert summary(score(own, ["a"], metadata='{"rm_type": "math"}', label="0.5", response="1/2")) == [1.0]
    error = error_of(own, ["a"])
    assert error.reason == "INVALID_FIELD"
    assert "rm_type" in str(error)


def test_a_function_is_read_again_after_an_edit(own):
    file = own.directory / "edited_rewards.py"
    file.write_text("def f(item): return 1.0\n")
    path = {"grader": "custom", "custom_path": "edited_rewards.f"}
    assert summary(score(own, ["a"], **path)) == [1.0]
    file.write_text("def f(item): return 22.0\n")
    assert summary(score(own, ["a", "b", "c", "d"], **path)) == [22.0] * 4


def test_a_request_without_items_checks_the_function(own):
    error = error_of(own, grader="custom", custom_path="user_rewards.gruped")
    assert (error.code.value, error.reason) == ("FAILED_PRECONDITION", "GRADER_NOT_LOADABLE")
    assert "grouped" in str(error)
    assert "custom_path" in str(error_of(own, grader="custom"))
    assert error_of(own, grader="math", options_json='{"boxed": true}').reason == "INVALID_FIELD"
    assert "JSON" in str(error_of(own, grader="math", options_json="{"))


def test_a_catastrophic_pattern_is_a_timeout_and_not_a_stall(own):
    slow = {"grader": "exact_match", "options_json": r'{"pattern": "(a+)+$"}'}
    caller = threading.Thread(target=lambda: outcome.extend(score(own, ["x"], response="a" * 40 + "!", **slow)))
    outcome: list = []
    caller.start()
    time.sleep(0.3)
    started = time.monotonic()
    assert summary(score(own, ["a"], grader="exact_match")) == [1.0]
    assert time.monotonic() - started < 0.5
    caller.join()
    assert summary(outcome) == ["TIMEOUT"]


def test_mathematics_without_an_end_costs_only_its_own_item(own):
    endless = pb.ScoreItem(item_id="endless", response=r"\boxed{9^{9^{9^{9}}}}", label="9")
    items = [pb.ScoreItem(item_id=str(i), response=str(i), label=str(i)) for i in range(7)]
    results = own.stub.Score(pb.ScoreRequest(grader="math", items=[*items, endless])).results
    assert summary(results) == [1.0] * 7 + ["TIMEOUT"]
