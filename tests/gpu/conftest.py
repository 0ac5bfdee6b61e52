"""What the GPU tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models that `rank_program` and `algorithm_program` load."""
    from tests.gpu.rank_program import write_model
    from tests.oracle.models import write_models

    path = tmp_path_factory.mktemp("cuda")
    write_models(path)
    write_model(path / "model")
    return path
