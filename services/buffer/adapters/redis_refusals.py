"""What the scripts refuse, as errors with a sentence. Knows no store."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import Code, ServiceError, invalid_field


def refusal(status: str, values: Sequence[bytes], run_id: str, context: dict[str, object]) -> ServiceError:
    """The error of a script's refusal; `values[0]` is the store's side of the contradiction."""
    have = values[0].decode() if values else ""
    step = context.get("step")
    if status == "RUN_FINISHED":
        return _finished(run_id, have, values[1].decode() if len(values) > 1 else "")
    if status == "VERSION_OUT_OF_ORDER":
        why = f"it must be above the published version {have} and at most the reserved version {values[1].decode()}"
        return invalid_field("version", context.get("version"), why)
    if status == "RUN_DELETING":
        message = f"Run {run_id} is being deleted; try again in a moment."
        return ServiceError(Code.UNAVAILABLE, status, message, retry_seconds=0.5, run_id=run_id)
    details: dict[str, object] = {"run_id": run_id}
    if status == "FENCED":
        message = (
            f"Trainer session {context.get('epoch')} of run {run_id} is over: session {have} holds the run; end this"
            " trainer, or begin a session."
        )
        details |= {"trainer_epoch": context.get("epoch"), "newest": have}
    elif status == "RUN_ACTIVE":
        message = f"Run {run_id} is active: its nodes and trainer would find it gone; end it first, or set force."
    elif status == "STEP_OUT_OF_ORDER":
        message = (
            f"Step {step} of run {run_id} does not follow: the last committed step is {have}, and a step is taken"
            " before it is committed."
        )
        details |= {"step": step, "committed_step": have}
    elif status == "STEP_NOT_RESTORABLE":
        message = f"Run {run_id} cannot be restored to step {step}: the last committed step is {have}."
        details |= {"step": step, "committed_step": have}
    elif status == "RESTORING":
        message = f"Run {run_id} is being restored to step {have}, which was cut off; call RestoreRun again."
        details |= {"step": have}
    elif status == "DATA_EXHAUSTED":
        message = (
            f"Run {run_id} has {have} prompts left, too few for the {context.get('count')} groups of step {step}; raise"
            " num_epoch, or lower num_rollout."
        )
        details |= {"step": step, "left": have}
    else:
        return ServiceError(Code.INTERNAL, "INTERNAL", f"The store answered {status} for run {run_id}.", run_id=run_id)
    return ServiceError(Code.FAILED_PRECONDITION, status, message, **details)


def _finished(run_id: str, state: str, reason: str) -> ServiceError:
    why = f" ({reason.rstrip('.')})" if reason else ""
    message = f"Run {run_id} is {state}{why}; create it again with the same run_id to go on."
    return ServiceError(Code.FAILED_PRECONDITION, "RUN_FINISHED", message, run_id=run_id, state=state, why=reason)
