"""What a collective library says of a failure, in one sentence. Without torch, for both ends of a weight group."""

from __future__ import annotations

import re


def first_sentence(error: Exception) -> str:
    """First line, without the source position that gloo puts before it and the advice behind; "" when it says none."""
    line = next(iter(str(error).strip().splitlines()), "")
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(" This is typically")[0]
