"""Functions of users, named by import path: "package.module.function"."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from services.common.errors import Code, ServiceError


def load_function(path: str, key: str, where: str) -> Callable[..., Any]:
    """The function at `path`, which the user gave as `key`, imported in this process (`where`, as in "the buffer").

    Raises FAILED_PRECONDITION/FUNCTION_NOT_LOADABLE with one sentence naming key, path and remedy.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise _unloadable(path, key, "it has no module part; write package.module.function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            why = f"there is no module {error.name!r}; is its directory on PYTHONPATH of {where}?"
        else:
            why = f"{module_name} needs the missing module {error.name!r}"
        raise _unloadable(path, key, why) from error
    except Exception as error:
        raise _unloadable(path, key, f"importing {module_name} raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise _unloadable(path, key, f"module {module_name} has no function {name!r}")
    return function


def _unloadable(path: str, key: str, why: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION, "FUNCTION_NOT_LOADABLE", f"{key} {path!r} cannot be used: {why}.", key=key, path=path
    )
