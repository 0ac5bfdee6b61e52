"""Functions of a user, as the settings of the tests' runs name them."""

from __future__ import annotations

ASKED: list = []


def by_reward(group):
    """Keeps good groups, drops bad ones, has the others made again."""
    ASKED.append(group.ordinal)
    return {2.0: "keep", 0.0: "drop"}.get(group.samples[0].reward, "requeue")


def unsure(group):
    """An answer that means nothing."""
    return "perhaps"


def newest_first(args, rollout_id, buffer, n):
    """slime's contract: returns groups and takes them out of the buffer."""
    ASKED.append((args.rollout_batch_size, rollout_id, len(buffer)))
    return [buffer.pop() for _ in range(n)]


def nothing(args, rollout_id, buffer, n):
    """Never content."""
    ASKED.append(len(buffer))
    return []


def foreign(args, rollout_id, buffer, n):
    """Returns a group twice."""
    return [buffer[0], buffer[0]]
