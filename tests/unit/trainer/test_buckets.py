"""Buckets of a weight update."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.core.buckets import ELEMENT_BYTES, TensorSpec, plan_buckets, plan_digest

specs = st.lists(
    st.builds(
        TensorSpec,
        name=st.text("abc.", min_size=1, max_size=8),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        shape=st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple),
    ),
    max_size=30,
)


@given(specs=specs, limit=st.integers(1, 4000))
def test_invariants(specs: list[TensorSpec], limit: int) -> None:
    plan = plan_buckets(specs, limit)
    assert [spec for bucket in plan.buckets for spec in bucket] == specs
    assert plan.total_bytes == sum(spec.size_bytes for spec in specs)
    for bucket in plan.buckets:
        assert len(bucket) == 1 or sum(spec.size_bytes for spec in bucket) <= limit
        offset = 0
        for spec in bucket:
            assert offset % ELEMENT_BYTES[spec.dtype] == 0
            offset += spec.size_bytes


def test_digest_depends_on_names_dtypes_shapes_and_order() -> None:
    a, b = TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "float32", (2, 3))
    variants = [[a, b], [b, a], [a], [a, TensorSpec("b", "float32", (3, 2))], [a, TensorSpec("b", "bfloat16", (2, 3))]]
    assert len({plan_digest(variant) for variant in variants}) == len(variants)
    assert plan_digest([a, b]) == plan_digest((a, b))
