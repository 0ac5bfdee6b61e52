"""A reward service of your own: the contract and nothing else of Tetrarch. `python server.py [port]`.

It offers one grader, `brevity`: 1 for a right answer, less for every word beyond the first ten.
"""

import sys
from concurrent import futures

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from tetrarch.reward.v1 import reward_service_pb2 as pb
from tetrarch.reward.v1 import reward_service_pb2_grpc as stubs


def brevity(item: pb.ScoreItem) -> float:
    """Your scoring goes here."""
    words = item.response.split()
    right = bool(item.label) and item.label in words
    return max(0.0, 1.0 - 0.02 * max(0, len(words) - 10)) if right else 0.0


GRADERS = {"brevity": brevity, "exact_match": brevity}
"""By name; a run asks for the one of its `rm_type`."""


class RewardService(stubs.RewardServiceServicer):
    """Scores every item; one that fails is unscored and costs no other item its reward."""

    def Score(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> pb.ScoreResponse:
        grader = GRADERS.get(request.grader)
        if grader is None:
            message = f"Unknown grader {request.grader!r}; use one of {', '.join(GRADERS)}."
            detail = any_pb2.Any()
            detail.Pack(error_details_pb2.ErrorInfo(reason="GRADER_NOT_FOUND", domain="external_reward"))
            status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=message, details=[detail])
            context.abort_with_status(rpc_status.to_status(status))
        return pb.ScoreResponse(results=[self._score(grader, item) for item in request.items])

    def _score(self, grader, item: pb.ScoreItem) -> pb.ScoreResult:
        try:
            return pb.ScoreResult(item_id=item.item_id, reward=grader(item))
        except Exception as error:
            return pb.ScoreResult(item_id=item.item_id, unscored_reason="GRADER_ERROR", message=repr(error))

    def ListGraders(self, request: pb.ListGradersRequest, context: grpc.ServicerContext) -> pb.ListGradersResponse:
        graders = [pb.Grader(name=name, description=function.__doc__) for name, function in GRADERS.items()]
        return pb.ListGradersResponse(graders=graders)


if __name__ == "__main__":
    server = grpc.server(futures.ThreadPoolExecutor(8))
    stubs.add_RewardServiceServicer_to_server(RewardService(), server)
    port = server.add_insecure_port(f"127.0.0.1:{sys.argv[1] if len(sys.argv) > 1 else 50064}")
    server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    server.wait_for_termination()
