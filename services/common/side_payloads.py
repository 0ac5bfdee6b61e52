"""Names and layouts of the large tensors that are stored beside samples. Shapes: P prompt tokens, R response tokens."""

from __future__ import annotations

ROUTED_EXPERTS = "routed_experts"
"""uint8 or int32 [n, layers · experts per token]: row i says where token i of the sample was sent. n is at least the
number of tokens that the last trained one was predicted from."""
KEPT_TOKENS = "kept_tokens"
"""int32 [R + n]: how many tokens top-p and top-k left to choose from at each response token (0: not told), and then
their ids, one response token after the other."""
