"""What keeps a trainer and an engine from sharing a collective, and what does not."""

from dataclasses import replace

import pytest

from services.common.errors import Code, ServiceError
from services.rollout.core.compatibility import TrainerSide, check_compatible
from services.rollout.core.engine_port import EngineInfo

ENV = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
ON_GPU = EngineInfo("sglang", "0.5.15.post1", "2.11.0+cu130", "2.28.9", ("nccl", "gloo"), ENV, 64, 64, 1, 8)
ON_CPU = replace(ON_GPU, torch_version="2.13.0+cpu", nccl_version="", backends=("gloo",), collective_env={})
NCCL = TrainerSide("nccl", "2.11.0+cu130", "2.28.9", ENV)
GLOO = TrainerSide("gloo", "2.13.1")


@pytest.mark.parametrize(
    ("info", "trainer"),
    [
        (ON_GPU, NCCL),
        (ON_GPU, replace(NCCL, torch_version="2.13.0")),  # NCCL does not ask for torch
        (ON_GPU, replace(NCCL, nccl_version="")),
        (ON_GPU, replace(NCCL, collective_env=ENV | {"NCCL_IB_DISABLE": "1"})),
        (ON_GPU, TrainerSide("gloo", "2.11.1")),
        (ON_CPU, GLOO),
    ],
)
def test_these_can_share_a_group(info, trainer):
    check_compatible("e", info, trainer)


@pytest.mark.parametrize(
    ("info", "trainer", "named"),
    [
        (ON_CPU, NCCL, "backend is 'nccl' at the trainer and 'gloo' at the engine"),
        (ON_GPU, replace(NCCL, nccl_version="2.28.3"), "NCCL is '2.28.3' at the trainer and '2.28.9'"),
        (ON_GPU, replace(NCCL, collective_env={}), "NCCL_CUMEM_ENABLE is 'unset' at the trainer and '0'"),
        (ON_GPU, replace(NCCL, collective_env=ENV | {"NCCL_CUMEM_ENABLE": "1"}), "NCCL_CUMEM_ENABLE is '1'"),
        (ON_GPU, replace(NCCL, collective_env=ENV | {"NCCL_P2P_DISABLE": "1"}), "NCCL_P2P_DISABLE is '1'"),
        (ON_CPU, replace(GLOO, torch_version="2.11.0"), "torch is '2.11.0' at the trainer and '2.13.0"),
    ],
)
def test_these_cannot_and_the_difference_is_named(info, trainer, named):
    with pytest.raises(ServiceError, match=named) as caught:
        check_compatible("e", info, trainer)
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "INCOMPATIBLE")
