"""Launch of the simulated engine: the same client as SGLang's, another process behind it. Starts nothing."""

from __future__ import annotations

import sys

from pydantic import ValidationError

from services.common.errors import Code, ServiceError
from services.common.settings import explain
from services.rollout.adapters.receiver_client import receiver_environment
from services.rollout.adapters.sglang import EngineFacts, SGLangEngine
from services.rollout.adapters.simulated_model import SimulatedSettings
from services.rollout.core.engine_port import EngineLaunch, LaunchSpec

SERVER = "services.rollout.adapters.simulated_server"
START_SECONDS = 30.0


class SimulatedFactory:
    """Builds simulated engines; all of one run answer alike."""

    kind = "simulated"

    def build(self, index: int, port: int, spec: LaunchSpec) -> EngineLaunch:
        del index
        try:
            settings = SimulatedSettings.model_validate({"seed": spec.seed} | dict(spec.simulated))
        except ValidationError as error:
            raise ServiceError(
                Code.INVALID_ARGUMENT, "INVALID_FIELD", f"simulated: {explain(error, SimulatedSettings)}"
            ) from error
        argv = [sys.executable, "-m", SERVER, "--model-path", str(spec.model_path), "--port", str(port)]
        argv += ["--group-timeout", str(spec.group_timeout), "--settings", settings.model_dump_json()]
        if spec.context_length:
            argv += ["--context-length", str(spec.context_length)]
        receiver = receiver_environment(port) if spec.staging else {}
        facts = EngineFacts(self.kind, "cpu", spec.model_path, rank_count=1, collective_env={}, receiver=receiver)
        return EngineLaunch(
            argv=tuple(argv),
            env={"OMP_NUM_THREADS": "1"} | receiver,
            engine=SGLangEngine(f"http://127.0.0.1:{port}", facts),
            start_seconds=START_SECONDS,
        )
