"""Settings of the trainer's process."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import ServiceSettings


class TrainerServiceSettings(ServiceSettings):
    """The trainer; everything about a run comes from the buffer."""

    port: int = Field(default=50052, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    buffer_address: str = "127.0.0.1:50051"
    """host:port of the buffer; ranks fetch their samples there too."""
    resume_active: bool = False
    """Resume the newest active run of the buffer at the start of this process."""
    weights_host: str | None = None
    """Host name by which engines reach rank 0 in a weight update; advertise_host, else host, when not set."""
    log_ranks: bool = False
    """Repeat the output of the ranks on this process's stderr, besides run_dir/logs."""
    setup_timeout: float = Field(default=600.0, gt=0)
    """Longest time in seconds for the ranks to build and load a model."""
    rank_start_timeout: float = Field(default=180.0, gt=0)
    """Longest time in seconds for rank processes to start."""
    step_timeout: float = Field(default=3600.0, gt=0)
    """Longest time of a training step in seconds."""
    save_timeout: float = Field(default=1800.0, gt=0)
    """Longest time of a checkpoint or an export in seconds."""
    engines_timeout: float = Field(default=600.0, gt=0)
    """Longest wait in seconds for any engine to take weights."""
    join_timeout: float = Field(default=15.0, gt=0)
    """Longest time in seconds for the members of a weight group to meet; who is late is left out of the update."""
    eval_timeout: float = Field(default=1800.0, gt=0)
    """Longest evaluation in seconds."""
    buffer_patience: float = Field(default=180.0, gt=0)
    """Seconds for which an unreachable buffer is asked again before the run ends."""
    stop_seconds: float = Field(default=60.0, ge=0)
    """After SIGTERM: longest wait for the step in progress and its checkpoint."""
    member_ttl: float = Field(default=10.0, gt=0)
    """Seconds until this trainer counts as gone in the registry unless it renews."""
