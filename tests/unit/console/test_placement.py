"""Who gets which GPUs, on a directory of device files that the test makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common import devices
from services.common.devices import resolve_device, visible_gpus
from services.common.settings import SettingsError
from services.console.cli.places import placement_for
from services.console.core.flags import parse_flags
from services.console.core.placement import NO_GPUS, NO_WISH, Placement, Wish, check_fit, deal
from services.console.core.resolve import resolve
from services.console.state import Running, StateDir
from services.console.tiers import Layout, Ports, embedded_tiers
from tests.unit.console.conftest import RUN


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Makes a machine with so many GPUs out of this one."""

    def make(count: int, visible: str | None = None) -> None:
        directory = tmp_path / "dev"
        directory.mkdir()
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))):
            (directory / name).touch()
        monkeypatch.setattr(devices, "DEVICE_FILES", directory)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def spec(*flags: str):
    return resolve(parse_flags(["run.yaml", *flags]))


@pytest.mark.parametrize(
    ("files", "listed", "expected"),
    [
        ([], None, ()),
        ([], "0", ()),
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-caps"], None, ("0", "1")),
        (["nvidia3"], None, ("0",)),
        (["dxg"], None, ("0",)),
        (["nvidia0", "nvidia1", "nvidia2"], "2, 0", ("2", "0")),
        (["nvidia0", "nvidia1"], "", ()),
        (["nvidia0", "nvidia1"], "-1", ()),
        (["nvidia0", "nvidia1"], "1,5,0", ("1",)),
        (["nvidia0"], "GPU-8f1c,GPU-77aa", ("GPU-8f1c", "GPU-77aa")),
    ],
)
def test_visible_gpus(tmp_path, files, listed, expected):
    for name in files:
        (tmp_path / name).touch()
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(environ, tmp_path) == expected


def test_auto_is_cuda_where_a_gpu_is_visible(gpus, monkeypatch):
    gpus(1)
    assert resolve_device("auto") == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto") == "cpu"
    assert resolve_device("cuda") == "cuda"


@pytest.mark.parametrize(
    ("visible", "wish", "needed", "trainer", "rollout"),
    [
        ("", NO_WISH, None, "", ""),
        ("0", NO_WISH, None, "0", "0"),
        ("01", NO_WISH, None, "0", "1"),
        ("01234567", NO_WISH, None, "0123", "4567"),
        ("012", NO_WISH, None, "0", "12"),
        ("4567", NO_WISH, (3, 1), "456", "7"),
        ("0123", NO_WISH, (1, 1), "0", "1"),
        ("0123", NO_WISH, (3, 2), "01", "23"),
        ("0123", Wish(trainer="2"), None, "2", "013"),
        ("0123", Wish(rollout="0,1"), (1, 1), "23", "01"),
        ("0123", Wish("3", "0"), None, "3", "0"),
        ("01", Wish("1", "1"), None, "1", "1"),
    ],
)
def test_dealing(visible, wish, needed, trainer, rollout):
    assert deal(tuple(visible), wish, needed) == Placement(tuple(trainer), tuple(rollout))


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (Wish(trainer="4"), "--trainer-gpus 4: there is no GPU 4; the GPUs here are 0, 1"),
        (Wish(rollout="1,1"), "--rollout-gpus 1,1 names a GPU twice; name each once."),
    ],
)
def test_wishes_that_cannot_be_met(wish, expected):
    with pytest.raises(SettingsError, match=expected):
        deal(("0", "1"), wish)


@pytest.mark.parametrize(
    ("flags", "placement", "expected"),
    [
        (
            ("--actor-num-gpus-per-node", "2"),
            Placement(("0",), ("1",)),
            "actor_num_gpus_per_node is 2, but the trainer",
        ),
        (
            ("--rollout-num-gpus", "3"),
            Placement(("0", "1"), ("2", "3")),
            "the rollout node has GPUs 2, 3; give it more",
        ),
        ((), Placement(("0",), ("0",)), "trainer and engines share GPU 0: NCCL takes no two"),
        ((), NO_GPUS, "the trainer has no GPU"),
    ],
)
def test_runs_that_do_not_fit(run_folder, flags, placement, expected):
    with pytest.raises(SettingsError, match=expected) as caught:
        check_fit(spec(*flags), placement)
    assert str(caught.value).endswith("or use device cpu.")


def test_runs_that_fit(run_folder):
    check_fit(spec("--rollout-num-gpus", "2"), Placement(("0",), ("1", "2")))
    check_fit(spec("--loss-type", "sft_loss"), Placement(("0",), ("0",)))  # nothing is generated


def test_tiers_see_their_own_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")  # the user's own value stays
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    layout = Layout(Ports(), tmp_path / "s", tmp_path / "l", resume=False, placement=Placement(("0", "1"), ("3",)))
    env = {tier.name: dict(tier.env) for stage in embedded_tiers(layout) for tier in stage}
    assert env["trainer"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert env["rollout"]["CUDA_VISIBLE_DEVICES"] == "3"
    for tier in ("trainer", "rollout"):
        assert env[tier]["NCCL_CUMEM_ENABLE"] == "0"
        assert "NCCL_NVLS_ENABLE" not in env[tier]
    assert all("CUDA_VISIBLE_DEVICES" not in env[tier] for tier in ("store", "buffer", "reward"))
    bare = Layout(Ports(), tmp_path / "s", tmp_path / "l", resume=False)
    assert all("CUDA_VISIBLE_DEVICES" not in tier.env for stage in embedded_tiers(bare) for tier in stage)


def test_placement_of_a_run(run_folder, gpus):
    state = StateDir(run_folder / "state")
    assert placement_for(spec("--device", "cpu"), state, NO_WISH) == NO_GPUS
    gpus(4, visible="1,2,3")
    assert placement_for(spec(), state, NO_WISH) == Placement(("1",), ("2",))
    assert placement_for(spec(), state, Wish(rollout="1")) == Placement(("2", "3"), ("1",))
    with pytest.raises(SettingsError, match="rollout_num_gpus is 9"):
        placement_for(spec("--rollout-num-gpus", "9"), state, NO_WISH)
    (run_folder / "run.yaml").write_text(RUN + "services: {buffer: 'elsewhere:1', trainer: 'elsewhere:2'}\n")
    assert placement_for(spec("--rollout-num-gpus", "9"), state, NO_WISH) == NO_GPUS
    with pytest.raises(SettingsError, match="do not apply to services that run elsewhere"):
        placement_for(spec(), state, Wish("1", "2"))


def test_a_run_on_running_tiers_uses_their_gpus(run_folder, gpus):
    gpus(4)
    state = StateDir(run_folder / "state")
    assert state.acquire()
    try:
        state.write(Running(1, "up", {}, gpus=Placement(("0",), ("1", "2", "3")).by_tier))
        assert placement_for(spec("--rollout-num-gpus", "3"), state, NO_WISH).rollout == ("1", "2", "3")
        with pytest.raises(SettingsError, match="actor_num_gpus_per_node is 2, but the trainer has GPU 0"):
            placement_for(spec("--actor-num-gpus-per-node", "2"), state, NO_WISH)
        with pytest.raises(SettingsError, match=r"`tetrarch up` .pid 1. has dealt out the GPUs"):
            placement_for(spec(), state, Wish(trainer="0"))
    finally:
        state.release()


def test_the_command_takes_and_refuses_them(run_folder):
    command = [sys.executable, "-m", "services.console", "train", "run.yaml", "--check", "--trainer-gpus", "77"]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60,
        env={"PYTHONPATH": f"{root}:{root / 'proto' / 'gen'}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("tetrarch: --trainer-gpus 77: there is no GPU 77")
