"""Makes a weight receiver lie, once for every flag file: it answers that all is there, and its memory is as it was.

Imported by a `sitecustomize` that a test writes (`installed`), in the processes of a node. As SGLang's own endpoint for
weights does when a broadcast fails: status 200, and what the memory held before.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TETRARCH_TEST_LIES"
_MODULE = "services.rollout.receiver.groups"


@contextmanager
def installed(directory: Path) -> Iterator[Path]:
    """Within, processes that start with `directory` in their path load this module. Gives the flag file: the first
    engine that receives weights while it exists takes it away, and lies."""
    (directory / "sitecustomize.py").write_text(f"import {__name__}\n")
    flag = directory / "lie"
    os.environ[VARIABLE] = str(flag)
    try:
        yield flag
    finally:
        del os.environ[VARIABLE]  # settings of other tests refuse names they do not know


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_patch(module) -> None:
            load(module)
            _patch(module.Groups)

        spec.loader.exec_module = load_and_patch
        return spec


def _patch(groups: type) -> None:
    honest = groups.receive

    def receive(self, name, tensors, timeout, before):
        try:
            Path(os.environ[VARIABLE]).unlink()
        except FileNotFoundError:
            return honest(self, name, tensors, timeout, before)
        return honest(self, name, [tensor.clone() for tensor in tensors], timeout, before)

    groups.receive = receive


if os.environ.get("TETRARCH_RECEIVER_DIR"):
    sys.meta_path.insert(0, _Finder())
