"""Whom the soak strikes, and when: a seeded deck of cards, and how a card is played.

A card is a tier and a moment: any time, a state of the tier (it serves, it updates, it saves), or a named moment of
`services.common.fault_points`. A moment that does not come in time is struck anyway, and said so.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import psutil
from tetrarch.rollout.v1 import engine_pb2

from benchmarks.soak_world import World, kill

ANY = "any time"
_STARTING = "starting again"
_SHARES = {
    "engine": 13,
    "router": 2,
    "node": 2,
    "reward": 3,
    "reward worker": 3,
    "buffer": 5,
    "store": 4,
    "trainer": 5,
    "rank": 3,
}
"""Cards of each tier in a deck of 40."""
TIERS = tuple(_SHARES)
_MOMENTS: dict[str, tuple[str, ...]] = {
    "engine": (
        ANY,
        "serving",
        "serving",
        _STARTING,
        "point engine.bucket",
        "while trainer.before_prepare",
        "while trainer.mid_transfer",
        "while trainer.before_commit",
        "while trainer.after_commit",
    ),
    "router": (ANY, "serving"),
    "node": (ANY, "point node.before_commit", "point node.after_commit", "point node.holding_leases",
             "point node.mid_put"),
    "reward": (ANY, "serving"),
    "reward worker": (ANY, "serving"),
    "buffer": (ANY, "UPDATING_WEIGHTS", "point buffer.after_commit_step", "point buffer.after_put"),
    "store": (ANY, "SAVING", "while buffer.after_commit_step", "while trainer.after_optimizer"),
    "trainer": (
        ANY,
        "TRAINING",
        "point trainer.before_prepare",
        "point trainer.mid_transfer",
        "point trainer.before_commit",
        "point trainer.after_commit",
        "point trainer.before_optimizer",
        "point trainer.after_optimizer",
        "point trainer.after_commit_step",
        "point trainer.after_checkpoint",
    ),
    "rank": (ANY, "TRAINING", "SAVING", "point rank.mid_transfer", "point rank.mid_checkpoint"),
}  # fmt: skip
_STOPPABLE = ("engine", "node", "reward", "buffer", "store", "trainer")
_STOPPED_SHARE = 0.3
"""Share of the strikes at no named moment whose victim is stopped first."""
_STOP_SECONDS = (2.0, 12.0)
_MOMENT_SECONDS = 10.0
"""Longest wait for a moment."""
_SUPERVISED = {"store": "store", "buffer": "buffer", "reward": "reward", "node": "rollout", "trainer": "trainer"}


@dataclass(frozen=True)
class Card:
    """A strike to be made. `stop_seconds`: how long the victim is stopped first, 0 kills at once; `spare`: it then goes
    on instead of being killed."""

    tier: str
    moment: str
    stop_seconds: float = 0.0
    spare: bool = False


@dataclass
class Strike:
    """A strike that was made. `at`: wall time of the kill; `recovered`: seconds until the next step ended."""

    number: int
    card: Card
    at: float
    step: int
    note: str = ""
    missed: bool = False
    """Whether the moment did not come, and the victim was struck anyway."""
    killed: bool = False
    recovered: float | None = None

    @property
    def text(self) -> str:
        """What was done, in words."""
        card = self.card
        what = "SIGKILL" if self.killed else "SIGCONT" if card.spare else "nothing"
        stopped = f"SIGSTOP {card.stop_seconds:.0f} s, " if card.stop_seconds else ""
        notes = [*(["did not come, struck anyway"] if self.missed else []), *([self.note] if self.note else [])]
        said = f" ({'; '.join(notes)})" if notes else ""
        return f"{card.tier}: {stopped}{what}, {card.moment}{said}"


class Deck:
    """Cards in a seeded order: every 40 hold every tier by its share, and every tier's moments come in turn."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._cards: deque[str] = deque()
        self._moments: dict[str, deque[str]] = {tier: deque() for tier in TIERS}

    def draw(self, allowed: Callable[[str], bool]) -> Card | None:
        """The first card whose tier is allowed now; None when no tier is. Cards that must wait stay where they are."""
        if not any(map(allowed, TIERS)):
            return None
        while (tier := next((card for card in self._cards if allowed(card)), None)) is None:
            cards = [tier for tier, share in _SHARES.items() for _ in range(share)]
            self._chance.shuffle(cards)
            self._cards.extend(cards)
        self._cards.remove(tier)
        if not self._moments[tier]:
            moments = list(_MOMENTS[tier])
            self._chance.shuffle(moments)
            self._moments[tier].extend(moments)
        moment = self._moments[tier].popleft()
        # A process that is held at a named moment stands still already.
        if (
            tier in _STOPPABLE
            and "." not in moment
            and moment != _STARTING
            and self._chance.random() < _STOPPED_SHARE * 2
        ):
            return Card(tier, moment, self._chance.uniform(*_STOP_SECONDS), self._chance.random() < 0.5)
        return Card(tier, moment)


@dataclass
class Striker:
    """Plays cards on a run."""

    world: World
    deck: Deck
    chance: random.Random
    strikes: list[Strike] = field(default_factory=list)

    @property
    def kills(self) -> Counter[str]:
        """SIGKILLs by tier."""
        return Counter(strike.card.tier for strike in self.strikes if strike.killed)

    def starts_owed(self, engine_id: str) -> int:
        """Starts of an engine that strikes at it, or at its node, explain."""
        owed = 0
        for strike in self.strikes:
            if strike.card.tier == "node":
                owed += strike.killed
            elif strike.card.tier == "engine" and engine_id in strike.note:
                owed += 2 if strike.card.moment == _STARTING else 1
        return owed

    async def strike(self) -> Strike | None:
        """Makes the next strike; None when no tier can be struck now."""
        node = await self.world.node()
        whole = node is not None and all(engine.state == engine_pb2.ENGINE_STATE_READY for engine in node.engines)

        def allowed(tier: str) -> bool:
            return whole or tier not in ("engine", "node", "router")

        card = self.deck.draw(allowed)
        if card is None:
            return None
        strike = Strike(len(self.strikes) + 1, card, time.time(), len(self.world.journal.step_times()))
        await self._play(strike)
        self.strikes.append(strike)
        return strike

    async def _play(self, strike: Strike) -> None:
        kind, _, name = strike.card.moment.partition(" ")
        if kind == "point":
            await self._at_point(strike, name, holder=True)
        elif kind == "while":
            await self._at_point(strike, name, holder=False)
        else:
            if strike.card.moment == _STARTING:
                await self._hit(strike)  # the first death; it is struck again while it comes up
            if strike.card.moment != ANY and not await self._state(strike.card.tier, strike.card.moment):
                strike.missed = True
            await self._hit(strike)

    # -- moments

    async def _state(self, tier: str, state: str) -> bool:
        """Waits for a state of the run."""
        if state == _STARTING:
            return await self._poll(self._an_engine_starts)
        if state == "serving":
            return await self._poll(self._serves)
        return await self._poll(lambda: self.world.phase_is(state))

    async def _serves(self) -> bool:
        node = await self.world.node()
        return bool(node and node.running_group_count)

    async def _an_engine_starts(self) -> bool:
        node = await self.world.node()
        return bool(node and any(map(_starts, node.engines)))

    async def _poll(self, holds: Callable[[], Awaitable[bool]]) -> bool:
        deadline = time.monotonic() + _MOMENT_SECONDS
        while time.monotonic() < deadline and not self.world.ended:
            if await holds():
                return True
            await asyncio.sleep(0.02)
        return False

    async def _at_point(self, strike: Strike, name: str, *, holder: bool) -> None:
        """Arms a named moment and strikes whoever is held there, or another while it is held."""
        armed, reached = self.world.fault_dir / name, self.world.fault_dir / f"{name}.reached"
        reached.unlink(missing_ok=True)
        armed.write_text("{}")
        try:
            if not await self.world.until(reached.exists, _MOMENT_SECONDS, 0.005):
                strike.missed = True
                armed.unlink(missing_ok=True)
                await self._hit(strike)
            elif holder:
                at = json.loads(reached.read_text())
                strike.at, strike.note = time.time(), at.get("engine", "")
                engine = strike.card.tier == "engine"
                strike.killed = kill(at["pgid"] if engine else at["pid"], group=engine)
            else:
                await self._hit(strike)
        finally:
            armed.unlink(missing_ok=True)
            reached.unlink(missing_ok=True)

    # -- blows

    async def _hit(self, strike: Strike) -> None:
        """Stops, kills or lets go a process of the tier."""
        found = await self._victim(strike)
        if found is None:
            strike.note = "nobody there"
            return
        pid, group = found
        card = strike.card
        strike.at = time.time()
        if card.stop_seconds:
            kill(pid, signal.SIGSTOP, group=group)
            await asyncio.sleep(card.stop_seconds)
            strike.at = time.time()
            if card.spare:
                kill(pid, signal.SIGCONT, group=group)
                return
        strike.killed = kill(pid, group=group) or strike.killed

    async def _victim(self, strike: Strike) -> tuple[int, bool] | None:
        """(pid, whether its whole group is meant)."""
        tier, world = strike.card.tier, self.world
        if tier == "engine":
            return await self._engine(strike)
        below = {"router": ("rollout", "router"), "rank": ("trainer", "trainer.ranks"),
                 "reward worker": ("reward", "")}  # fmt: skip
        if tier in below:
            found = world.below(*below[tier])
            return (self.chance.choice(found).pid, False) if found else None
        process = world.tier(_SUPERVISED[tier])
        return (process.pid, False) if process else None

    async def _engine(self, strike: Strike) -> tuple[int, bool] | None:
        """An engine with all its processes, or only one of them."""
        node = await self.world.node()
        engines = [engine for engine in node.engines if engine.pid] if node else []
        if not engines:
            return None
        engine = self.chance.choice([engine for engine in engines if _starts(engine)] or engines)
        strike.note = engine.engine_id
        if self.chance.random() < 0.25:
            try:
                parts = psutil.Process(engine.pid).children(recursive=True)
            except psutil.Error:
                parts = []
            if parts:
                strike.note += ", one process of it"
                return self.chance.choice(parts).pid, False
        return engine.pid, True


def _starts(engine: engine_pb2.Engine) -> bool:
    return engine.state == engine_pb2.ENGINE_STATE_STARTING
