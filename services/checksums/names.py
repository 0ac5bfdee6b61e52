"""Names of the algorithms, without torch. `compute` defines them."""

SHA256, TILED = "sha256-64", "sglang-tiled-64"
"""SGLang's own of a tensor on a CPU and on a GPU."""
ALGORITHMS = (SHA256, TILED)
