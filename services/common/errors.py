"""Errors that reach a user.

A `ServiceError` carries everything a caller needs: a status code, a reason (UPPER_SNAKE, listed in the
proto comment of the call), one sentence that names the key or id at fault and the remedy, and the dynamic
values of that sentence as metadata. This module knows nothing of gRPC, so `core/` packages may raise it.

To add a reason: write it in the comment of the RPC in `proto/`, then raise it here by that name.
"""

from __future__ import annotations

import enum


class Code(enum.Enum):
    """Status codes; names equal gRPC's."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


class ServiceError(Exception):
    """A failure with a name.

    Args:
        code: status code.
        reason: UPPER_SNAKE name, at most 63 characters.
        message: one sentence for the user.
        retry_seconds: when the caller should try again; None when it should not by itself.
        metadata: every dynamic value of the message, by name.
    """

    def __init__(
        self, code: Code, reason: str, message: str, *, retry_seconds: float | None = None, **metadata: object
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_seconds = retry_seconds
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"ServiceError({self.code.value}, {self.reason}, {self.message!r})"

    def __reduce__(self):
        return (_rebuild, (self.code, self.reason, self.message, self.retry_seconds, self.metadata))


def _rebuild(code, reason, message, retry_seconds, metadata) -> ServiceError:
    """Keyword-only arguments do not survive Exception's own pickling."""
    return ServiceError(code, reason, message, retry_seconds=retry_seconds, **metadata)


def invalid_field(field: str, value: object, why: str) -> ServiceError:
    """The error for a request field that cannot be used."""
    return ServiceError(
        Code.INVALID_ARGUMENT, "INVALID_FIELD", f"{field} is {value!r}: {why}.", field=field, value=value
    )
