"""Deals the GPUs of one machine out to trainer and rollout node, and judges whether a run fits.

Knows ids and numbers, not how devices are found or processes started. Invariant: without a wish of the user no GPU is
given to both tiers, unless there is only one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.devices import COLLECTIVE_ENV, VISIBLE
from services.common.run_spec import RunSpec
from services.common.settings import SettingsError

TIERS = ("trainer", "rollout")
SHARING = "NCCL takes no two members of a weight group on one GPU, so a run with engines needs a GPU for each"


@dataclass(frozen=True)
class Placement:
    """GPU ids by tier; both empty where there is no GPU."""

    trainer: tuple[str, ...] = ()
    rollout: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.trainer or self.rollout)

    @property
    def by_tier(self) -> dict[str, list[str]]:
        """As it is kept in a file."""
        return {"trainer": list(self.trainer), "rollout": list(self.rollout)}

    @classmethod
    def of(cls, by_tier: Mapping[str, Sequence[str]]) -> Placement:
        """The same back."""
        return cls(*(tuple(by_tier.get(tier, ())) for tier in TIERS))

    @property
    def shared(self) -> tuple[str, ...]:
        """GPUs of both tiers."""
        return tuple(gpu for gpu in self.trainer if gpu in self.rollout)

    def env(self, tier: str, environ: Mapping[str, str]) -> dict[str, str]:
        """What a tier's environment gets beside `environ`; empty where there is no GPU."""
        if not self:
            return {}
        gpus = {VISIBLE: ",".join(getattr(self, tier))}
        return gpus | {name: value for name, value in COLLECTIVE_ENV.items() if name not in environ}

    def __str__(self) -> str:
        return f"trainer on {_gpus(self.trainer)}, engines on {_gpus(self.rollout)}"


NO_GPUS = Placement()


@dataclass(frozen=True)
class Wish:
    """What the user said: "0,1" by tier, None for a tier of which nothing was said."""

    trainer: str | None = None
    rollout: str | None = None

    def __bool__(self) -> bool:
        return self.trainer is not None or self.rollout is not None


NO_WISH = Wish()


def gpus_needed(spec: RunSpec) -> tuple[int, int]:
    """GPUs of a run's trainer, actor and critic, and of its engines on CUDA. SFT and a replay have no engine;
    simulated: no device."""
    engines = not spec.engineless and spec.rollout.engine == "sglang"
    return spec.trainer.world_size + spec.trainer.critic_world_size, spec.rollout.rollout_num_gpus if engines else 0


def deal(visible: Sequence[str], wish: Wish, needed: tuple[int, int] | None = None) -> Placement:
    """Who gets which GPUs. Raises SettingsError for a wish that names a GPU which is not `visible`.

    A tier of which nothing was said gets what the other leaves. When nothing was said at all: the first ones for the
    trainer and the next for the engines, as many as are `needed` where that is known and fits, else half each.
    """
    trainer, rollout = (
        _listed(name, text, visible) for name, text in (("trainer", wish.trainer), ("rollout", wish.rollout))
    )
    if trainer is None and rollout is None:
        if len(visible) == 1:
            return Placement(tuple(visible), tuple(visible))
        first = len(visible) // 2
        if needed and needed[0] <= len(visible) - needed[1]:
            first = needed[0]
            visible = visible[: sum(needed)]
        return Placement(tuple(visible[:first]), tuple(visible[first:]))
    if trainer is None:
        trainer = tuple(gpu for gpu in visible if gpu not in rollout)
    if rollout is None:
        rollout = tuple(gpu for gpu in visible if gpu not in trainer)
    return Placement(trainer, rollout)


def _listed(tier: str, text: str | None, visible: Sequence[str]) -> tuple[str, ...] | None:
    if text is None:
        return None
    gpus = tuple(part.strip() for part in text.split(",") if part.strip())
    if len(set(gpus)) < len(gpus):
        raise SettingsError(f"--{tier}-gpus {text} names a GPU twice; name each once.")
    for gpu in gpus:
        if gpu not in visible:
            known = f"the GPUs here are {', '.join(visible)}" if visible else "there is no GPU here"
            raise SettingsError(f"--{tier}-gpus {text}: there is no GPU {gpu}; {known} ({VISIBLE} counts when set).")
    return gpus


def check_fit(spec: RunSpec, placement: Placement) -> None:
    """Raises SettingsError when a run on CUDA does not fit what each tier was given. Actor and critic may share."""
    trainer, (_, engines) = spec.trainer, gpus_needed(spec)
    given = (
        ("actor_num_gpus_per_node", "the trainer", trainer.world_size, placement.trainer, "trainer"),
        ("critic_num_gpus_per_node", "the trainer", trainer.critic_world_size, placement.trainer, "trainer"),
        ("rollout_num_gpus", "the rollout node", engines, placement.rollout, "rollout"),
    )
    for key, who, needed, gpus, tier in given:
        if needed > len(gpus):
            raise SettingsError(
                f"{key} is {needed}, but {who} has {_gpus(gpus)}; give it more with --{tier}-gpus, set {key} to at most"
                f" {len(gpus)}, or use device cpu."
                if gpus
                else f"{key} is {needed}, but {who} has no GPU; give it one with --{tier}-gpus, or use device cpu."
            )
    if engines and (shared := placement.shared):
        raise SettingsError(
            f"trainer and engines share {_gpus(shared)}: {SHARING}; name them with --trainer-gpus and --rollout-gpus,"
            " or use device cpu."
        )


def _gpus(gpus: Sequence[str]) -> str:
    if not gpus:
        return "no GPU"
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)}"
