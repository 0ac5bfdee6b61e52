"""Replay: what does not go together is refused with the remedy."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.common.run_spec import RunSpec
from services.common.settings import explain
from services.common.side_payloads import KEPT_TOKENS, ROUTED_EXPERTS

ROLLOUT = {"hf_checkpoint": "model", "num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 2}


@pytest.mark.parametrize(
    ("trainer", "rollout", "sentence"),
    [
        ({"use_routing_replay": True, "use_rollout_logprobs": True}, {}, "set use_rollout_routing_replay, or leave"),
        ({"use_routing_replay": True, "keep_old_actor": True}, {}, "by the weights of several versions"),
        ({"use_top_p_replay": True}, {}, "no effect with rollout_top_p 1.0 and rollout_top_k -1"),
        ({"use_routing_replay": True, "loss_type": "sft_loss"}, {}, "use_routing_replay has no meaning with loss_type"),
        (
            {"use_rollout_routing_replay": True},
            {"load_debug_rollout_data": "file.jsonl"},
            "use_rollout_routing_replay needs engines that tell what they decided",
        ),
        (
            {"use_top_p_replay": True, "use_opd": True, "opd_teacher_url": "http://host:1"},
            {"rollout_top_p": 0.9},
            "opd_type sglang with use_top_p_replay: an engine gives log-probs over all tokens",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(trainer: dict, rollout: dict, sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate({"data": {"label_key": "label"}, "rollout": ROLLOUT | rollout, "trainer": trainer})
    assert sentence in explain(caught.value, RunSpec)


@pytest.mark.parametrize(
    ("trainer", "names"),
    [
        ({}, ()),
        ({"use_routing_replay": True}, ()),
        ({"use_rollout_routing_replay": True, "use_rollout_logprobs": True}, (ROUTED_EXPERTS,)),
        ({"use_rollout_routing_replay": True, "use_top_p_replay": True}, (ROUTED_EXPERTS, KEPT_TOKENS)),
    ],
)
def test_a_rank_fetches_what_is_replayed(trainer: dict, names: tuple[str, ...]) -> None:
    spec = RunSpec.model_validate({"rollout": ROLLOUT | {"rollout_top_k": 50}, "trainer": trainer})
    assert spec.trainer.side_payloads == names
    assert spec.trainer.replays_rollout is bool(names)
