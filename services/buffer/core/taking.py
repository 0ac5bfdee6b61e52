"""Taking a batch of a run whose settings name functions for stale groups or for the choice of groups.

The store asks, a function of the user answers outside of it, and the answer is acted on only for groups that are
still what they were. Invariants: the functions are asked of a group once for each published version and payload, of a
choice once for each set of READY groups; a step that is reserved is never asked about again.
"""

from __future__ import annotations

from services.buffer.core.ports import Store, UserFunctions
from services.buffer.core.records import Batch, GroupKey, Question

_ROUNDS = 1000


class Taking:
    """TakeBatch over a store and the user's functions."""

    def __init__(self, store: Store, functions: UserFunctions) -> None:
        self._store = store
        self._functions = functions
        self._declined: dict[str, tuple[int, int, tuple[GroupKey, ...]]] = {}
        """By run: (step, groups wanted, READY groups) of which the filter picked too few."""

    async def take(self, run_id: str, trainer_epoch: int, step: int, count: int) -> Batch:
        """One attempt at a batch, without headers when there is none yet."""
        picks: tuple[GroupKey, ...] = ()
        for _ in range(_ROUNDS):
            answer = await self._store.take(run_id, trainer_epoch, step, count, picks)
            if isinstance(answer, Batch):
                return answer
            if not answer.pick:
                await self._judge(run_id, answer)
                continue
            picks = await self._pick(run_id, step, count)
            if not picks:
                return Batch(b"", len(self._declined[run_id][2]), 0, answer.policy_version)
        return Batch(b"", 0, 0, 0)

    async def _judge(self, run_id: str, question: Question) -> None:
        run = await self._store.get_run(run_id)
        groups = await self._store.ready_groups(run_id, question.keys)
        if groups:
            verdicts = await self._functions.judge(run.spec_json, question.policy_version, groups)
            by_key = {group.key: verdict for group, verdict in zip(groups, verdicts, strict=True)}
            await self._store.judge(run_id, question.policy_version, by_key)

    async def _pick(self, run_id: str, step: int, count: int) -> tuple[GroupKey, ...]:
        """What the filter picks; nothing when it picks too few."""
        groups = await self._store.ready_groups(run_id, None)
        situation = (step, count, tuple(group.key for group in groups))
        if self._declined.get(run_id) == situation:
            return ()
        picks: list[GroupKey] = []
        if len(groups) >= count:
            run = await self._store.get_run(run_id)
            picks = await self._functions.pick(run.spec_json, step, groups, count)
        if len(picks) == count:
            self._declined.pop(run_id, None)
            return tuple(picks)
        self._declined[run_id] = situation
        return ()
