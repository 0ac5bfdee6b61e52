"""What engines tell for replay goes beside the samples, through the buffer to a rank."""

from __future__ import annotations

import json
import shutil

import numpy as np
from tetrarch.rollout.v1 import engine_pb2

from services.common.side_payloads import KEPT_TOKENS, ROUTED_EXPERTS
from services.rollout.adapters.simulated_recordings import kept_ids, routed_experts
from services.trainer.ranks.fetch import SampleSource
from tests.contract.rollout_v1.trainer_side import push

LAYERS, PER_TOKEN, EXPERTS = 2, 2, 8


def with_experts(checkpoint, directory):
    """The same checkpoint, which says that it has experts: the simulated engine looks no further."""
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


async def test_experts_and_kept_tokens_reach_a_rank_as_the_engine_told_them(client, world, tmp_path):
    await client.create_run(
        rollout={"hf_checkpoint": str(with_experts(world.checkpoint, tmp_path / "model")), "rollout_top_p": 0.9},
        trainer={"use_rollout_routing_replay": True, "use_top_p_replay": True},
    )
    (engine,) = await client.engines(engine_pb2.ENGINE_STATE_STALE)
    await push(client, engine, 1)
    await client.engines(engine_pb2.ENGINE_STATE_READY)
    await client.publish(1)
    groups = await client.ready_groups(8)
    vocabulary = json.loads((world.checkpoint / "config.json").read_text())["vocab_size"]

    source = SampleSource((ROUTED_EXPERTS, KEPT_TOKENS))
    wanted = [sample.sample_id for got in groups for sample in got.group.samples]
    samples = source.fetch(world.buffer_address, client.run_id, wanted)
    source.close()
    assert len({tuple(sample.tokens.tolist()) for sample in samples.values()}) == len(samples), "no sample twice"
    for sample in samples.values():
        tokens, response = sample.tokens.tolist(), sample.tokens[sample.prompt_length :].tolist()
        expected = routed_experts(tokens[:-1], LAYERS, PER_TOKEN, EXPERTS).reshape(-1, LAYERS * PER_TOKEN)
        found = sample.side[ROUTED_EXPERTS]
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected)
        masks = [kept_ids(token, vocabulary) for token in response]
        flat = [*(len(mask) for mask in masks), *(token for mask in masks for token in mask)]
        np.testing.assert_array_equal(sample.side[KEPT_TOKENS], flat)
        np.testing.assert_allclose(sample.log_probs, [-np.log(len(mask)) for mask in masks], rtol=1e-6)
