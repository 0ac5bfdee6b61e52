"""Why files of weights cannot be used, as one sentence and a reason that programs tell apart."""

from __future__ import annotations

from services.common.errors import Code, ServiceError


def base_mismatch(version: int, why: str, **metadata: object) -> ServiceError:
    """The bytes that a delta builds upon are not here: full files help."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "BASE_MISMATCH",
        f"Version {version} cannot be made from what is here: {why}.",
        version=version,
        why=why,
        retry_seconds=None,  # so that `metadata` cannot hold it
        **metadata,
    )


def files_corrupt(path: object, why: str, **metadata: object) -> ServiceError:
    """The files are not what their manifest says: writing them anew helps."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "FILES_CORRUPT",
        f"The weights in {path} are damaged: {why}.",
        path=path,
        why=why,
        retry_seconds=None,  # so that `metadata` cannot hold it
        **metadata,
    )


def files_missing(path: object, why: object) -> ServiceError:
    """The directory or a file of it cannot be read on this host: another transport helps."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "FILES_MISSING",
        f"{path} cannot be read on this host: {why}.",
        path=path,
        why=why,
    )


def files_not_written(path: object, why: object) -> ServiceError:
    """The directory cannot be written to: another transport helps."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "FILES_NOT_WRITTEN",
        f"Weights cannot be written to {path}: {why}.",
        path=path,
        why=why,
    )
