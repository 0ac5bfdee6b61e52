"""Which graders there are, which one an item gets, and which options each takes."""

from __future__ import annotations

from typing import Any

from services.common.errors import Code, ServiceError, invalid_field
from services.common.settings import suggest
from services.reward.core.exact_match import parse_options
from services.reward.core.records import Item, Job

EXACT_MATCH, MATH, CUSTOM = "exact_match", "math", "custom"
GRADERS = {
    EXACT_MATCH: "1 when the response equals the label, else 0; options strip, lower, extract, pattern, label_pattern",
    MATH: "1 when the final answer equals the label as mathematics, else 0; options boxed_only, precision",
    CUSTOM: "a Python function of yours, named by custom_path",
}


def check_grader(name: str) -> str:
    """The name. Raises GRADER_NOT_FOUND, which lists the known ones."""
    if name not in GRADERS:
        known = ", ".join(GRADERS)
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "GRADER_NOT_FOUND",
            f"Unknown grader {name!r}; use one of {known}.{suggest(name, list(GRADERS))}",
            grader=name,
            known=known,
        )
    return name


def grader_of(item: Item, job: Job) -> str:
    """Grader of one item: the job's, else `rm_type` of its metadata. Raises GRADER_NOT_FOUND, INVALID_FIELD."""
    if job.grader:
        return check_grader(job.grader)
    name = item.metadata.get("rm_type")
    if not name:
        raise invalid_field("grader", "", f"item {item.item_id!r} has no rm_type in its metadata either; set one")
    return check_grader(str(name))


_MATH_OPTIONS = {"boxed_only": bool, "precision": int}


def check_options(grader: str, options: dict[str, Any]) -> None:
    """Raises INVALID_FIELD for an option that a built-in grader does not take. A custom function gets any."""
    if grader == EXACT_MATCH:
        parse_options(options)
    elif grader == MATH:
        for key, value in options.items():
            if key not in _MATH_OPTIONS:
                raise invalid_field("options_json", key, f"math has no such option; use {', '.join(_MATH_OPTIONS)}")
            if type(value) is not _MATH_OPTIONS[key]:
                raise invalid_field(f"options_json.{key}", value, f"it must be of type {_MATH_OPTIONS[key].__name__}")


def check_custom_path(path: str) -> tuple[str, str]:
    """Module and attribute of an import path. Raises GRADER_NOT_LOADABLE."""
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module or not name:
        raise not_loadable(path, "write it as package.module.function")
    return module, name


def not_loadable(path: str, why: str) -> ServiceError:
    """The error for a reward function that cannot be used."""
    return ServiceError(
        Code.FAILED_PRECONDITION, "GRADER_NOT_LOADABLE", f"Cannot use reward function {path!r}: {why}.", path=path
    )
