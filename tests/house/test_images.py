"""Images and compose files without Docker: linted, of the compose schema, and saying the same as the services.

`test_images_start.py` starts their commands.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from services.buffer.config import BufferSettings
from services.common.devices import COLLECTIVE_ENV
from services.common.run_spec import RunSpec
from services.common.settings import build_settings
from services.reward.config import RewardSettings
from services.rollout.config import RolloutNodeSettings
from services.trainer.config import TrainerServiceSettings

from . import compose_file
from .compose_file import CPU, DATA, GPU, Dockerfile, dockerfile, mounts, seconds, servers
from .tree import ROOT, TIERS

SETTINGS = {
    "buffer": BufferSettings,
    "reward": RewardSettings,
    "rollout": RolloutNodeSettings,
    "trainer": TrainerServiceSettings,
}
DOCKERFILES = sorted([*ROOT.glob("services/*/Dockerfile"), *ROOT.glob("deploy/**/*Dockerfile")])
GPU_TIERS = ("rollout", "trainer")


def tool(*command: str) -> None:
    """Runs a program that lies beside this Python."""
    program = str(Path(sys.executable).parent / command[0])
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def settings(name: str, monkeypatch: pytest.MonkeyPatch):
    """What a service makes of its command and environment; SettingsError for a key that it does not have."""
    service = servers(GPU)[name]
    for key, value in service.get("environment", {}).items():
        monkeypatch.setenv(key, value)
    assert compose_file.module(service) == f"services.{name}"
    return build_settings(SETTINGS[name], service["command"][3:], f"TETRARCH_{name.upper()}_")


def environment(name: str) -> dict[str, str]:
    """A service's environment."""
    return servers(GPU)[name]["environment"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_hadolint_has_nothing_to_say(path):
    tool("hadolint", str(path))


@pytest.mark.parametrize("path", [GPU, CPU], ids=lambda path: path.name)
def test_compose_schema(path):
    tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(path))


def test_every_tier_and_the_console_have_an_image():
    assert {path.parent.name for path in ROOT.glob("services/*/Dockerfile")} == {*TIERS, "console"}
    assert set(servers(GPU)) == {*TIERS, "store"}


def test_variables_are_in_dotenv_with_the_same_default():
    known = compose_file.dotenv()
    used = compose_file.variables(GPU) | compose_file.variables(CPU)
    assert {**used, "COMPOSE_FILE": GPU.name} == known


def test_four_gpus_train_and_four_generate():
    trainer, rollout = (environment(name)["CUDA_VISIBLE_DEVICES"].split(",") for name in ("trainer", "rollout"))
    assert len(trainer) == len(rollout) == 4
    assert sorted(trainer + rollout) == [str(gpu) for gpu in range(8)]


def test_containers_of_a_weight_group_are_one_host_to_nccl():
    ours = [{key: value for key, value in environment(name).items() if "NCCL" in key} for name in GPU_TIERS]
    assert ours[0] == ours[1]
    assert ours[0].items() >= {**COLLECTIVE_ENV, "NCCL_HOSTID": "tetrarch"}.items()
    for name in GPU_TIERS:
        service = servers(GPU)[name]
        assert service["ipc"] == "host"
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        # A container that sees its own GPUs only cannot reach the others over NVLink.
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


@pytest.mark.parametrize("path", [GPU, CPU], ids=lambda path: path.name)
def test_servers_are_watched_and_restarted(path):
    for name, service in servers(path).items():
        assert service["restart"] == "unless-stopped", name
        health = service["healthcheck"]
        assert seconds(health["timeout"]) > 3, "the check itself waits 3 s"
        assert health["retries"] > 1
        if name != "store":
            assert health["test"][:4] == ["CMD", "python", "-m", "services.common.healthcheck"], name


@pytest.mark.parametrize("name", TIERS)
def test_settings_are_the_services_own(name, monkeypatch):
    service, found = servers(GPU)[name], settings(name, monkeypatch)
    assert found.port == SETTINGS[name].model_fields["port"].default
    assert (found.host, found.allow_insecure_bind, found.advertise_host) == ("0.0.0.0", True, name)
    stop = found.drain_seconds + getattr(found, "stop_seconds", 0)
    assert seconds(service["stop_grace_period"]) > stop
    full_name = {"buffer": "Buffer", "reward": "Reward", "rollout": "Rollout", "trainer": "Trainer"}[name] + "Service"
    assert service["healthcheck"]["test"][4:] == [f"127.0.0.1:{found.port}", f"tetrarch.{name}.v1.{full_name}"]


def test_addresses_name_services_that_are_waited_for(monkeypatch):
    ports = {name: settings(name, monkeypatch).port for name in TIERS} | {"store": store_option("--port")}
    for name in TIERS:
        found, service = settings(name, monkeypatch), servers(GPU)[name]
        named = {value for key, value in found if key.endswith("_address")}
        if name == "buffer":
            named = {found.store_url.removeprefix("redis://").removesuffix("/0")}
        assert named <= {f"{host}:{port}" for host, port in ports.items()}, name
        hosts = {address.split(":")[0] for address in named}
        assert set(service.get("depends_on", {})) == hosts, name
        assert all(wait == {"condition": "service_healthy"} for wait in service.get("depends_on", {}).values())
    console = " ".join(compose_file.services(GPU)["console"]["command"])
    assert f"--buffer buffer:{ports['buffer']} --trainer trainer:{ports['trainer']}" in console


def store_option(name: str) -> str:
    """Value of a flag of the store's server."""
    command = servers(GPU)["store"]["command"]
    return command[command.index(name) + 1]


def test_the_store_keeps_what_it_is_told():
    service = servers(GPU)["store"]
    assert (store_option("--appendonly"), store_option("--appendfsync")) == ("yes", "everysec")
    assert store_option("--maxmemory-policy") == "noeviction"
    assert mounts(service) == {store_option("--dir"): ("store", True)}
    assert f"-p {store_option('--port')} ping" in service["healthcheck"]["test"][1]
    assert re.fullmatch(r"valkey/valkey:\d+\.\d+", service["image"])


@pytest.mark.parametrize("path", [GPU, CPU], ids=lambda path: path.name)
def test_nothing_is_published_but_on_loopback(path):
    for name, service in compose_file.services(path).items():
        assert "network_mode" not in service, name
        published = service.get("ports", [])
        assert not published or name == "console", name
        assert all(str(port).startswith("127.0.0.1:") for port in published), name


def test_files_of_a_run_have_one_path():
    volumes = {name: mounts(service) for name, service in compose_file.services(GPU).items() if name != "store"}
    assert len({paths[DATA][0] for paths in volumes.values()}) == 1
    assert {name for name, paths in volumes.items() if not paths[DATA][1]} == {"reward"}
    declared = set(yaml.safe_load(GPU.read_text())["volumes"])
    assert {source for paths in volumes.values() for source, _ in paths.values()} <= declared
    assert all(service["working_dir"] == DATA for name, service in compose_file.services(GPU).items() if name in TIERS)


def test_the_console_is_no_server():
    console = compose_file.services(GPU)["console"]
    assert (console["profiles"], console["restart"]) == (["cli"], "no")
    assert console["command"][0] == "tetrarch"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_images_are_pinned_small_and_not_root(path):
    image = Dockerfile.read(path)
    for base in image.bases:
        name, _, tag = base.partition(":")
        assert tag
        assert tag != "latest"
        assert not re.search(r"[.:]", name.split("/")[0]), "a plain image name, without a registry"
    assert image.all("USER") == ["10001"]
    assert image.all("WORKDIR")[-1] == DATA
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert image.extras <= set(extras)
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for source in image.sources:
        assert (ROOT / source).exists(), source
        assert any(source == root or source.startswith(root + "/") for root in allowed), f".dockerignore hides {source}"


@pytest.mark.parametrize("name", [*TIERS, "console"])
def test_an_image_holds_one_service(name):
    image = dockerfile(compose_file.services(GPU)[name], GPU)
    assert image.path == ROOT / "services" / name / "Dockerfile"
    shared = {"services/common"} | ({"services/checksums"} if name in GPU_TIERS else set())  # both sides of an update
    assert {source for source in image.sources if source.startswith("services")} == {*shared, f"services/{name}"}
    assert image.extras == {name}
    program = {"console": ["tetrarch"]}.get(name, ["python", "-m", f"services.{name}"])
    assert yaml.safe_load(image.all("CMD")[-1])[: len(program)] == program
    assert any("cuda" in base for base in image.bases) is (name in GPU_TIERS)


def test_trainer_and_engines_have_the_same_torch():
    pins = {name: dockerfile(servers(GPU)[name], GPU).pins for name in GPU_TIERS}
    assert pins["trainer"]["torch"] == pins["rollout"]["torch"] == "2.11.0"
    assert pins["trainer"]["megatron-core"] == "0.16.1"
    wanted = {"sglang": "0.5.15.post1", "sglang-kernel": "0.4.4", "transformers": "5.12.1"}
    assert pins["rollout"].items() >= wanted.items()


def test_the_cpu_image_has_the_packages_of_make_setup():
    image = dockerfile(servers(CPU)["tetrarch"], CPU)
    makefile = (ROOT / "Makefile").read_text()
    for package in ("torch", "sglang", "xgrammar"):
        assert f"{package}=={image.pins[package]}" in makefile
    (extras,) = re.findall(r"-e '\.\[([\w,-]+)\]'", makefile)
    assert image.extras == set(extras.split(",")) - {"dev"}
    assert servers(CPU)["tetrarch"]["command"] == yaml.safe_load(image.all("CMD")[-1]) == ["tetrarch", "up"]


def test_the_run_file_of_the_guide_uses_every_gpu(monkeypatch):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE | re.DOTALL)
    spec = RunSpec.model_validate(yaml.safe_load(text))
    devices = [len(environment(name)["CUDA_VISIBLE_DEVICES"].split(",")) for name in ("trainer", "rollout")]
    assert [spec.trainer.world_size, spec.rollout.rollout_num_gpus] == devices
    for name in ("buffer", "reward", "trainer"):
        if address := getattr(spec.services, name):
            assert address == f"{name}:{settings(name, monkeypatch).port}"
