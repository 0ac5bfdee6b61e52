"""What the client does where a release promises less: against a server that answers as 0.5.15 does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from aiohttp import web

from services.common.errors import ServiceError
from services.common.records import SamplingParams
from services.rollout.adapters.nccl_library import _text, nccl_version
from services.rollout.adapters.sglang import EngineFacts, SGLangEngine
from services.rollout.adapters.sglang_release import RELEASES, is_tested, release_of
from services.rollout.core.engine_port import GenerationRequest, GroupSpec, TensorSpec

REQUEST = GenerationRequest("r", (1, 2), SamplingParams(max_new_tokens=2, temperature=1.0))
SPECS = [TensorSpec("w", "bfloat16", (2,))]


class OldServer:
    """Answers of SGLang 0.5.15.post1 on a GPU to what the client asks; `calls` lists the paths."""

    def __init__(self) -> None:
        self.calls, self.version, self.waiting = [], "3", 0
        self.on_generate = lambda: None

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.calls.append(path)
        body = json.loads(await request.text() or "{}")
        if path == "/server_info":
            inner = [{"effective_max_running_requests_per_dp": 48}]
            return web.json_response(
                {"version": "0.5.15.post1", "max_running_requests": None, "dtype": "bfloat16", "internal_states": inner}
            )
        if path == "/model_info":
            return web.json_response({"weight_version": self.version})
        if path == "/flush_cache":
            return web.Response(
                text="Flush cache failed." if self.waiting else "Cache flushed.", status=400 if self.waiting else 200
            )
        if path == "/abort_request":
            self.waiting = 0
        if path == "/generate":
            self.on_generate()
            meta = {"weight_version": self.version, "finish_reason": {"type": "length"}}
            meta["output_token_logprobs"] = [[-0.5, 7, None], [-0.25, 8, None]]
            return web.json_response({"text": "ab", "meta_info": meta})
        if path == "/weights_checker":
            rank = {"checksums": {"w": "00ff00ff00ff00ff"}, "per_gpu_checksum": "", "parallelism_info": {"tp_rank": 0}}
            return web.json_response({"success": True, "message": "Success.", "ranks": [rank]})
        if path.endswith("_weight_update"):
            return web.json_response({"detail": "Not Found"}, status=404)
        assert body.get("flush_cache", False) is False  # it would kill the scheduler
        return web.json_response({"success": True, "message": ""})


@pytest.fixture
async def server():
    old = OldServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", old.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    old.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield old
    await runner.cleanup()


@pytest.fixture
async def engine(server, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, "max_position_embeddings": 64}))
    facts = EngineFacts("sglang", "cuda", tmp_path, 1, {}, release=release_of("0.5.15.post1"))
    client = SGLangEngine(server.url, facts)
    yield client
    await client.close()


def test_a_release_has_the_newest_row_that_is_not_newer():
    assert release_of("0.5.15.post1") is release_of("0.5.20") is release_of("0.5.9") is RELEASES[0]
    assert release_of("0.5.22").brackets_updates
    assert release_of("0.5.23") is release_of("0.6.0") is release_of("") is RELEASES[-1]
    assert is_tested("0.5.23", "cpu")
    assert not is_tested("0.5.23", "cuda")
    assert is_tested("0.5.15.post1", "cuda")
    assert not is_tested("0.5.15", "cuda")


async def test_its_info_and_checksums_are_read(engine):
    assert (await engine.info()).max_running == 48
    assert engine.checksum_algorithm == "sglang-tiled-64"
    assert await engine.checksums() == {"w": "00ff00ff00ff00ff"}


def test_what_cannot_be_compared_has_no_checksum(tmp_path):
    for device, ranks, version in (("cpu", 1, "0.5.15.post1"), ("cuda", 2, "0.5.23")):
        facts = EngineFacts("sglang", device, tmp_path, ranks, {}, release=release_of(version))
        assert SGLangEngine("http://127.0.0.1:9", facts).checksum_algorithm == ""


async def test_an_update_has_no_brackets(engine, server):
    await engine.begin_update()
    await engine.join_group(GroupSpec("g", "nccl", "127.0.0.1", 1, 2, 1), 5.0)
    await engine.receive_bucket(SPECS, "g", 5.0)
    await engine.end_update()
    assert server.calls == ["/init_weights_update_group", "/update_weights_from_distributed"]


async def test_a_bucket_for_a_group_it_is_not_in_is_never_sent(engine, server):
    """An assertion would end its scheduler."""
    with pytest.raises(ServiceError, match="not a member") as caught:
        await engine.receive_bucket(SPECS, "g", 5.0)
    assert caught.value.reason == "TRANSFER_FAILED"
    assert server.calls == []


async def test_requests_that_keep_the_cache_from_being_flushed_are_ended(engine, server):
    server.waiting = 2
    await engine.pause("retract")
    assert await engine.flush_cache()
    assert server.calls[1:] == ["/flush_cache", "/abort_request", "/flush_cache"]


async def test_requests_paused_in_place_are_left_alone(engine, server):
    server.waiting = 2
    await engine.pause("in_place")
    assert not await engine.flush_cache()
    await engine.resume()
    assert not await engine.flush_cache()
    assert "/abort_request" not in server.calls


async def test_a_request_over_an_update_counts_as_made_by_the_older_version(engine, server):
    server.on_generate = lambda: setattr(server, "version", "4")
    (generation,) = await engine.generate(REQUEST, 5.0)
    assert [span.version for span in generation.versions] == [3]


async def test_a_sampling_key_it_would_break_on_is_refused(engine, server):
    request = GenerationRequest("r", (1,), SamplingParams(max_new_tokens=2), extra={"temprature": 1})
    with pytest.raises(ServiceError, match="temprature"):
        await engine.generate(request, 5.0)
    assert "/generate" not in server.calls


def test_ncclis_release_is_read_from_its_number():
    assert _text(22809) == "2.28.9"
    assert nccl_version() == nccl_version()


def test_spawned_workers_of_a_cuda_server_wait_for_groups_no_longer_than_told(tmp_path):
    """The server is a stand-in that starts a worker as SGLang does."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "worker.py").write_text(
        "from torch.distributed import distributed_c10d\n"
        "def run():\n    print('waits', distributed_c10d.default_pg_timeout.total_seconds())\n"
    )
    (package / "launch_server.py").write_text(
        "import multiprocessing, sys\nfrom sglang.worker import run\n"
        "if __name__ == '__main__':\n    assert sys.argv[1:] == ['--port', '1']\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=run)\n    worker.start()\n    worker.join()\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    argv = [sys.executable, "-m", "services.rollout.adapters.sglang_cuda_launcher", "--port", "1"]
    env = os.environ | {"PYTHONPATH": path, "TETRARCH_GROUP_TIMEOUT_SECONDS": "7.5"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=55, check=False)
    assert done.stdout.split() == ["waits", "7.5"], done.stderr
