"""Looking into a run: counts and lists of groups. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.buffer.core.ports import Dataset, Store
from services.buffer.core.records import GroupFilter, GroupRecord, Stats

_LOOK_AHEAD = 500


def without_clock(stats: Stats) -> Stats:
    """The counts without what changes although nothing happens in the run."""
    return replace(stats, oldest_age_seconds={}, store_used_bytes=0, store_limit_bytes=0)


async def with_datasets(stats: Stats, dataset: Dataset) -> Stats:
    """The counts with the prompts drawn from each data set of the mixture."""
    return replace(stats, drawn_by_dataset=await dataset.drawn_by_dataset(stats.drawn))


async def list_groups(
    store: Store, dataset: Dataset | None, run_id: str, page: tuple[int, int], wanted: GroupFilter
) -> tuple[list[GroupRecord], bool]:
    """(at most page[1] groups from ordinal page[0] on, whether more follow).

    Without its data set a group's origin is unknown, and no group belongs to a data set that is asked for.
    """
    start, count = page
    if not wanted.dataset:
        groups, more = await store.list_groups(run_id, start, count, wanted)
        return await with_origins(dataset, groups), more
    found: list[GroupRecord] = []
    more = dataset is not None
    while more and len(found) <= count:
        groups, more = await store.list_groups(run_id, start, _LOOK_AHEAD, wanted)
        found += [group for group in await with_origins(dataset, groups) if group.dataset == wanted.dataset]
        start = groups[-1].ordinal + 1 if groups else start
    return found[:count], len(found) > count


async def with_origins(dataset: Dataset | None, groups: Sequence[GroupRecord]) -> list[GroupRecord]:
    """The groups with the data set, and its epoch, that each was drawn from."""
    if dataset is None or not groups:
        return list(groups)
    origins = await dataset.origins([group.ordinal for group in groups])
    return [replace(group, dataset=name, epoch=epoch) for group, (name, epoch) in zip(groups, origins, strict=True)]
