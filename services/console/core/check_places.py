"""Can the run be kept and computed where it says? Looks at directories and devices; makes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from services.common.devices import VISIBLE, visible_gpus
from services.common.run_spec import RunSpec
from services.common.sample_file import step_path
from services.common.settings import SettingsError


def check_places(spec: RunSpec) -> None:
    """Checks run_dir, save, directories of weights, save_debug_rollout_data and device. Raises SettingsError."""
    check_writable(spec.run_dir, "run_dir")
    check_writable(spec.directory, "run_dir")
    if spec.trainer.save:
        check_writable(spec.trainer.save, "save")
    if spec.trainer.update_weight_disk_dir:
        check_writable(spec.trainer.update_weight_disk_dir, "update_weight_disk_dir")
    if spec.rollout.save_debug_rollout_data:
        check_writable(str(step_path(spec.rollout.save_debug_rollout_data, 0).parent), "save_debug_rollout_data")
    if spec.rollout.device == "cuda" and not visible_gpus():
        raise SettingsError(
            f"device is 'cuda' but this machine has no CUDA device ({VISIBLE} counts when set); use cpu, or auto."
        )


def check_writable(path: str, key: str) -> None:
    """The directory, or the nearest one above it that exists, must take new files. Raises SettingsError."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    where = f"{key} {path}" + (f": {place}" if place != Path(path) else "")
    if not place.is_dir():
        raise SettingsError(f"{where} is no directory; name another place with {_flag(key)}.")
    # Some file systems take no files from anybody, whatever the permissions say.
    if not os.access(place, os.W_OK | os.X_OK) or Path(os.path.realpath(place)).parts[1:2] in (("proc",), ("sys",)):
        raise SettingsError(f"{where} is not writable; permit it, or name another place with {_flag(key)}.")


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")
