"""Which kinds of engine this session did not run."""

import pytest

from tests.support.engine import KINDS, missing


def test_every_kind_of_engine_can_run_here():
    left_out = [f"{kind}: {missing(kind)}" for kind in KINDS if missing(kind)]
    if left_out:
        pytest.skip("; ".join(left_out))
