"""Command lines of SGLang servers, on the CPU and on CUDA. Starts nothing and imports no SGLang.

Users' `sglang:` arguments pass through; those that the node settles itself are refused with the reason.
The CPU defaults were measured on 2 cores with a model of 0.5 M parameters, 3 layers: one thread (two are four
times slower when anything else runs), one request per prompt with n samples, up to 256 decoded together.
On CUDA an engine takes the devices `index * ranks ...` of those the node sees; where these end, engines begin at the
first again and share. SGLang warms up before it calls itself healthy, so readiness includes compiled kernels.
Tested with sglang 0.5.23 (CPU) and 0.5.15.post1 (CUDA).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from services.common import devices
from services.common.errors import Code, ServiceError
from services.common.telemetry import get_logger
from services.rollout.adapters.checkpoint import installed_version, model_config
from services.rollout.adapters.receiver_client import receiver_environment
from services.rollout.adapters.sglang import EngineFacts, SGLangEngine
from services.rollout.adapters.sglang_release import release_of
from services.rollout.core.engine_port import EngineLaunch, LaunchSpec
from services.rollout.receiver.server import PATH as RECEIVER

log = get_logger(__name__)

CPU_LAUNCHER = "services.rollout.adapters.sglang_cpu_launcher"
VOCABULARY_MULTIPLE = 64
CUDA_LAUNCHER = "services.rollout.adapters.sglang_cuda_launcher"
GROUP_TIMEOUT_VARIABLE = "TETRARCH_GROUP_TIMEOUT_SECONDS"

OWNED = {
    "model": "hf_checkpoint names the model",
    "model_path": "hf_checkpoint names the model",
    "tokenizer_path": "the tokenizer comes from hf_checkpoint",
    "host": "engines listen on the loopback of their node",
    "port": "the node picks free ports",
    "device": "set rollout.device",
    "tp": "set rollout_num_gpus_per_engine",
    "tp_size": "set rollout_num_gpus_per_engine",
    "tensor_parallel_size": "set rollout_num_gpus_per_engine",
    "dp": "weight groups need one replica per engine; start more engines with rollout_num_gpus",
    "dp_size": "weight groups need one replica per engine; start more engines with rollout_num_gpus",
    "data_parallel_size": "weight groups need one replica per engine; start more engines with rollout_num_gpus",
    "context_length": "set rollout_max_context_len",
    "random_seed": "set rollout_seed",
    "base_gpu_id": "the node deals out the devices it sees (CUDA_VISIBLE_DEVICES)",
    "weight_version": "versions are the trainer's",
    "skip_tokenizer_init": "graders need the text",
    "api_key": "engines are reached on the loopback only",
    "admin_api_key": "engines are reached on the loopback only",
    "nnodes": "an engine lives on one node",
    "node_rank": "an engine lives on one node",
    "skip_server_warmup": "the node decides when an engine is ready",
}
"""Server arguments the node settles, with what to do instead."""

COMMON_ENV = {
    # Otherwise /health generates a token and takes a second.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
CPU_ENV = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    # SGLang takes CUDA's paths wherever torch sees a GPU.
    devices.VISIBLE: "",
    "TORCHDYNAMO_DISABLE": "1",
    # Imports warn some thirty times about accelerators that are not there.
    "PYTHONWARNINGS": "ignore",
}
NCCL_WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""torch's watchdog would end an engine whose trainer died. An engine that hangs in its group is found as the node has
it leave the group, and is replaced then."""

CPU_RUNNING = 256
CPU_CACHE_TOKENS = 65536
CPU_START_SECONDS = 180.0
CUDA_START_SECONDS = 900.0
"""A large model is read from a cold disk; some kernels are compiled at their first start."""
SHARED_MEMORY_FRACTION = 0.85
"""Of a device, for all engines on it together."""
SHARED_CACHE_BYTES = 8 * 2**30
"""Cache of each engine on a shared device. SGLang sizes its cache by what is free as it starts; engines that start
together would count the same memory twice."""


class SGLangFactory:
    """Builds SGLang engines."""

    kind = "sglang"

    def build(self, index: int, port: int, spec: LaunchSpec) -> EngineLaunch:
        if importlib.util.find_spec("sglang") is None:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "ENGINE_MISSING",
                "engine is 'sglang', but the package sglang is not installed beside this node: run `make setup` "
                "(docs/deploy.md with GPUs), or set rollout.engine to simulated.",
            )
        device = resolve_device(spec.device)
        user = check_arguments(spec.sglang)
        arguments: dict[str, Any] = {
            "model_path": str(spec.model_path),
            "host": "127.0.0.1",
            "port": port,
            "device": device,
            "tp_size": spec.rank_count,
            "random_seed": spec.seed + index,
            "log_level": "warning",
        }
        arguments |= recording_arguments(spec)
        cuda_env = collective_env() if device == "cuda" else {}
        if spec.context_length:
            arguments["context_length"] = spec.context_length
        if device == "cpu":
            arguments |= cpu_defaults(spec, user)
            module, own_env, seconds = CPU_LAUNCHER, dict(CPU_ENV), CPU_START_SECONDS
            if spec.rank_count > 1:
                own_env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(spec.rank_count))
        else:
            arguments |= cuda_defaults(index, spec)
            unset = {name: value for name, value in NCCL_WATCHDOG_OFF.items() if name not in os.environ}
            module, own_env, seconds = CUDA_LAUNCHER, cuda_env | unset, CUDA_START_SECONDS
        own_env[GROUP_TIMEOUT_VARIABLE] = str(spec.group_timeout)
        receiver = receiver_environment(port) if spec.staging else {}
        if receiver:
            user["custom_weight_loader"] = [RECEIVER, *_listed(user.get("custom_weight_loader"))]
        facts = EngineFacts(
            kind=self.kind,
            device=device,
            model_path=spec.model_path,
            rank_count=spec.rank_count,
            collective_env=cuda_env,
            vocabulary_multiple=VOCABULARY_MULTIPLE,
            release=release_of(installed_version("sglang")),
            receiver=receiver,
        )
        return EngineLaunch(
            argv=(sys.executable, "-m", module, *command_line(arguments | user)),
            env=COMMON_ENV | own_env | receiver,
            engine=SGLangEngine(f"http://127.0.0.1:{port}", facts),
            start_seconds=seconds,
        )


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def resolve_device(device: str) -> str:
    """ "cpu" or "cuda"; "auto" is CUDA where a GPU is visible."""
    if device not in ("auto", "cpu", "cuda"):
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
            f"rollout.device is {device!r}: use auto, cpu or cuda.",
            device=device,
        )
    return devices.resolve_device(device)


def check_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The user's pass-through arguments in snake_case; INVALID_ARGUMENT for one that the node settles."""
    result: dict[str, Any] = {}
    for key, value in arguments.items():
        name = key.lstrip("-").replace("-", "_")
        if name in OWNED:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INVALID_FIELD",
                f"sglang.{name} is {value!r}, but the rollout node sets this argument itself: {OWNED[name]}.",
                field=f"sglang.{name}",
                value=value,
            )
        result[name] = value
    return result


def recording_arguments(spec: LaunchSpec) -> dict[str, Any]:
    """What an engine needs to tell where tokens were routed, and among which the sampler chose.

    Raises FAILED_PRECONDITION/ENGINE_UNSUITABLE for a release that cannot."""
    version = installed_version("sglang")
    if spec.record.kept and not release_of(version).sampling_masks:
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "ENGINE_UNSUITABLE",
            f"use_top_p_replay needs an engine that says which tokens top-p left, SGLang from 0.5.19 on, and this node"
            f" has {version}: install a newer release, or leave it out.",
            version=version,
        )
    arguments: dict[str, Any] = {"enable_return_routed_experts": True} if spec.record.experts else {}
    if spec.record.kept:
        # A place where all tokens are left is told as well; a request that exceeds this is ended by the engine.
        arguments["sampling_mask_max_tokens"] = model_config(spec.model_path)["vocab_size"]
    return arguments


def collective_env() -> dict[str, str]:
    """What an engine on CUDA will have of the variables a weight group must agree on: this process's, else ours."""
    own = {name: os.environ[name] for name in devices.COLLECTIVE_VARIABLES if name in os.environ}
    return devices.COLLECTIVE_ENV | own


def cuda_defaults(index: int, spec: LaunchSpec) -> dict[str, Any]:
    """Arguments of engine `index` on CUDA: bfloat16, as trained there, and its place among the devices.

    Raises INVALID_ARGUMENT/INVALID_FIELD when an engine has more ranks than there are devices.
    """
    ranks, count = spec.rank_count, len(devices.visible_gpus())
    chosen: dict[str, Any] = {"dtype": "bfloat16", "base_gpu_id": index * ranks}
    if not count:  # the driver shows them in a way unknown here: SGLang will see
        return chosen
    places = count // ranks
    if not places:
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
            f"An engine of {ranks} devices (rollout_num_gpus_per_engine) does not fit on the {count} that this node "
            "sees (CUDA_VISIBLE_DEVICES).",
            rank_count=ranks,
            device_count=count,
        )
    chosen["base_gpu_id"] = index % places * ranks
    sharing = -(-spec.engine_count // places)
    if sharing > 1:
        log.warning("engines share devices", engines=spec.engine_count, devices=count, engines_per_device=sharing)
        chosen["mem_fraction_static"] = round(SHARED_MEMORY_FRACTION / sharing, 3)
        chosen["max_total_tokens"] = SHARED_CACHE_BYTES // _cache_bytes(spec)
    return chosen


def _cache_bytes(spec: LaunchSpec) -> int:
    """Cache of one token on one rank, in bfloat16."""
    config = model_config(spec.model_path)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    stored_heads = -(-(config.get("num_key_value_heads") or heads) // spec.rank_count)
    return 2 * 2 * config["num_hidden_layers"] * stored_heads * head_dim


def cpu_defaults(spec: LaunchSpec, user: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a small model on few cores. float32 makes log-probs equal the trainer's to 1e-6."""
    context = spec.context_length or model_config(spec.model_path)["max_position_embeddings"]
    running = int(user.get("max_running_requests") or CPU_RUNNING)
    return {
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        # An idle scheduler would poll with a whole core, which the trainer needs.
        "sleep_on_idle": True,
        "mem_fraction_static": 0.1,
        "max_running_requests": running,
        "max_total_tokens": max(2 * context, min(running * context, CPU_CACHE_TOKENS)),
        # A warm-up request would sample a token; the first real one does as well.
        "skip_server_warmup": True,
    }


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Flags: True stands alone, False and None are left out, lists repeat values, mappings are JSON."""
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        if isinstance(value, (list, tuple)):
            flags.extend(str(item) for item in value)
        else:
            flags.append(json.dumps(dict(value)) if isinstance(value, Mapping) else str(value))
    return flags
