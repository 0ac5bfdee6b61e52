"""The process of Tetrarch's own reward service: start, drain, death."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import psutil
import pytest
from tetrarch.reward.v1 import reward_service_pb2 as pb

from services.common.healthcheck import check
from services.common.process import free_port

from .conftest import USER_REWARDS, Server


@pytest.fixture
def short_lived(tmp_path):
    """A service that the test ends itself."""
    port = free_port()
    (tmp_path / "user_rewards.py").write_text(USER_REWARDS)
    argv = [sys.executable, "-m", "services.reward", "--set", f"port={port}", "--set", "workers=1"]
    server = Server(argv, port, tmp_path, "exact_match")
    server.wait_until(lambda: not check(server.address, "tetrarch.reward.v1.RewardService"))
    yield server
    server.process.kill()
    server.process.wait()
    server.channel.close()


def judge(server) -> pb.ScoreResponse:
    item = pb.ScoreItem(item_id="a", metadata_json='{"weight": 1}')
    return server.stub.Score(pb.ScoreRequest(grader="custom", custom_path="user_rewards.judge", items=[item]))


def all_gone(processes: list[psutil.Process], seconds: float = 10.0) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def test_calls_in_flight_finish_and_no_worker_stays(short_lived):
    judge(short_lived)
    children = psutil.Process(short_lived.process.pid).children(recursive=True)
    assert len(children) >= 2
    answers: list[pb.ScoreResponse] = []
    caller = threading.Thread(target=lambda: answers.append(judge(short_lived)))
    caller.start()
    time.sleep(0.15)
    short_lived.process.terminate()
    caller.join()
    assert answers[0].results[0].reward == 1.0
    assert short_lived.process.wait(10) == 0
    assert all_gone(children)


def test_workers_die_with_the_service(short_lived):
    judge(short_lived)
    children = psutil.Process(short_lived.process.pid).children(recursive=True)
    short_lived.process.kill()
    assert all_gone(children)


def test_a_port_in_use_is_one_sentence_and_exit_code_2(own, tmp_path):
    (tmp_path / "precious").touch()
    port = own.address.rpartition(":")[2]
    argv = [sys.executable, "-m", "services.reward", "--set", f"port={port}"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"Cannot listen on {own.address}" in done.stderr
    assert (tmp_path / "precious").exists()
