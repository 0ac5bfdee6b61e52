"""Commands that measure.

`python -m benchmarks.NAME [--json FILE]` prints every figure beside its bar and fails when one falls short.
"""
