"""What every reward service owes its callers, Tetrarch's or anyone's."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tetrarch.reward.v1 import reward_service_pb2 as pb

from services.common.channel import service_error


def request(server, labels=("42", "7"), **fields) -> pb.ScoreRequest:
    items = [
        pb.ScoreItem(item_id=f"item-{i}", prompt="6 * 7 =", response="42", label=label, group_id="g")
        for i, label in enumerate(labels)
    ]
    return pb.ScoreRequest(**{"grader": server.grader, "items": items, "budget": Duration(seconds=10), **fields})


def test_one_result_per_item_in_order(server):
    response = server.stub.Score(request(server))
    assert [result.item_id for result in response.results] == ["item-0", "item-1"]
    assert [result.reward for result in response.results] == [1.0, 0.0]


def test_a_result_has_a_reward_or_a_reason(server):
    response = server.stub.Score(request(server, labels=("42", "", "7")))
    assert len(response.results) == 3
    for result in response.results:
        assert result.HasField("reward") != bool(result.unscored_reason)


def test_zero_is_a_reward(server):
    (result,) = server.stub.Score(request(server, labels=("7",))).results
    assert result.HasField("reward")


def test_the_same_request_twice_is_the_same_answer(server):
    first, second = (server.stub.Score(request(server)) for _ in range(2))
    assert [r.reward for r in first.results] == [r.reward for r in second.results]


def test_no_items_is_not_an_error(server):
    assert not server.stub.Score(request(server, labels=())).results


def test_unknown_grader_lists_the_known_ones(server):
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.Score(request(server, grader="exactmatch"))
    error = service_error(caught.value)
    assert (error.code.value, error.reason) == ("INVALID_ARGUMENT", "GRADER_NOT_FOUND")
    for grader in server.stub.ListGraders(pb.ListGradersRequest()).graders:
        assert grader.name in str(error)
        assert grader.description


def test_listed_graders_are_known(server):
    names = [grader.name for grader in server.stub.ListGraders(pb.ListGradersRequest()).graders]
    assert server.grader in names
    assert len(set(names)) == len(names)
