"""Weight groups as the controller keeps them: which engines are in which, and how bytes get to them.

Knows nothing of an update's steps (`weights`). Invariants:
- An engine is in one group at most. A group stands from update to update while its members are the same processes and
  every update in it was committed; after anything else it is left, and its name is never used again. The engines' side
  does the same.
- One order for all communicators: groups are dealt, begun and left by name, engines by id, old ones left before new
  ones are begun. So two that share a process are made, and ended, in the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.trainer.core.commands import (
    Command,
    GroupErrors,
    GroupSpec,
    JoinGroups,
    LeaveGroups,
    SendWeights,
    SetupResult,
)
from services.trainer.core.ports import Prepared
from services.trainer.core.records import EngineView

Ask = Callable[[Command], Awaitable[Any]]
"""A command to rank 0 that it answers at once."""


class Carrier(Protocol):
    """How the staged bytes reach the engines of one group. All calls return at once; that the bytes have arrived is for
    the engines to say."""

    @property
    def spec(self) -> GroupSpec | None:
        """The group to join, if bytes travel over one."""
        ...

    @property
    def weights_path(self) -> str:
        """The files to read, as the engines see them, if bytes travel in files."""
        ...

    async def begin(self, timeout: float) -> None:
        """Before engines are asked to prepare, for a carrier that does not stand. `timeout`: seconds to meet."""
        ...

    async def send(self, timeout: float) -> None:
        """When they are prepared. `timeout`: seconds for all bytes."""
        ...

    async def error(self) -> str | None:
        """What went wrong on this side."""
        ...

    async def end(self) -> None:
        """Gives it up, whatever it is at."""
        ...


class Broadcast:
    """Bytes over a communicator of rank 0's and the engines' ranks. A `Carrier`."""

    weights_path = ""

    def __init__(self, spec: GroupSpec, ask: Ask) -> None:
        self.spec = spec
        self._ask = ask

    async def begin(self, timeout: float) -> None:
        await self._ask(JoinGroups((self.spec,), timeout))

    async def send(self, timeout: float) -> None:
        await self._ask(SendWeights((self.spec.name,), timeout))

    async def error(self) -> str | None:
        return (await self._ask(GroupErrors((self.spec.name,))))[self.spec.name]

    async def end(self) -> None:
        await self._ask(LeaveGroups((self.spec.name,)))


@dataclass
class Group:
    """Engines that get their bytes together, and fail together. `stands`: from an earlier update. `prepared` of the
    present update, by engine id."""

    name: str
    carrier: Carrier
    members: tuple[EngineView, ...]
    stands: bool = False
    prepared: dict[str, Prepared] = field(default_factory=dict)

    @property
    def processes(self) -> tuple[tuple[str, str], ...]:
        """Engine ids and incarnations."""
        return tuple((engine.engine_id, engine.incarnation) for engine in self.members)


class GroupTable:
    """The groups that stand.

    Args:
        ask: rank 0.
        setup: what rank 0 said of itself.
        size: most engines of a group.
        place: run, host name of rank 0, and what gives a free port.
    """

    def __init__(self, ask: Ask, setup: SetupResult, size: int, place: tuple[str, str, Callable[[], int]]) -> None:
        self._ask = ask
        self._setup = setup
        self._size = size
        self._run_id, self._address, self._free_port = place
        self._standing: list[Group] = []

    def deal(self, epoch: int, engines: Sequence[EngineView]) -> tuple[list[Group], dict[str, str]]:
        """Groups that stand and hold none but `engines`; the other engines of one backend in new groups. → groups by
        name, and engines that fit nowhere with the reason."""
        here = {(engine.engine_id, engine.incarnation): engine for engine in engines}
        groups = []
        for group in self._standing:
            if here.keys() >= set(group.processes):
                members = tuple(here.pop(process) for process in group.processes)
                groups.append(Group(group.name, group.carrier, members, stands=True))
        by_backend: dict[str, list[EngineView]] = {}
        refused: dict[str, str] = {}
        for engine in sorted(here.values(), key=lambda engine: engine.engine_id):
            backend = next((name for name in engine.backends if name in self._setup.backends), None)
            if backend is None:
                refused[engine.engine_id] = (
                    f"it has no collective backend of the trainer: it offers {', '.join(engine.backends) or 'none'},"
                    f" the trainer {', '.join(self._setup.backends)}"
                )
            else:
                by_backend.setdefault(backend, []).append(engine)
        count = 0
        for backend, members in by_backend.items():
            for start in range(0, len(members), self._size):
                part = tuple(members[start : start + self._size])
                groups.append(self._new(f"{self._run_id}-{epoch}-{count}", backend, part))
                count += 1
        return sorted(groups, key=lambda group: group.name), refused

    def _new(self, name: str, backend: str, members: tuple[EngineView, ...]) -> Group:
        spec = GroupSpec(
            name=name,
            backend=backend,
            master_address=self._address,
            master_port=self._free_port(),
            world_size=1 + sum(engine.rank_count for engine in members),
        )
        return Group(name, Broadcast(spec, self._ask), members)

    async def begin(self, groups: Iterable[Group], timeout: float) -> None:
        """Begins the new ones of `groups`, after the groups that their members were in have been left."""
        new = [group for group in groups if not group.stands]
        taken = {engine.engine_id for group in new for engine in group.members}
        await self.leave([group for group in self._standing if taken & dict(group.processes).keys()])
        for group in new:
            if group.carrier.spec is not None:
                self._standing.append(group)
            await group.carrier.begin(timeout)

    async def keep(self, engines: Sequence[EngineView]) -> None:
        """Leaves the groups in which there is anyone else than `engines`: all that live."""
        live = {(engine.engine_id, engine.incarnation) for engine in engines}
        await self.leave([group for group in self._standing if not live.issuperset(group.processes)])

    async def leave(self, groups: Iterable[Group]) -> None:
        """Our end of the groups is gone for good; the engines leave theirs by Abort or at their next Prepare."""
        gone = sorted(groups, key=lambda group: group.name)
        names = {group.name for group in gone}
        self._standing = [group for group in self._standing if group.name not in names]
        for group in gone:
            await group.carrier.end()
