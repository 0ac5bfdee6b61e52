"""Compose files and Dockerfiles as data: variables filled in, and what an image is made of. Needs no Docker."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .tree import ROOT

GPU, CPU = ROOT / "docker-compose.gpu.yml", ROOT / "deploy" / "compose" / "cpu.yml"
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
DATA = "/data"


def dotenv() -> dict[str, str]:
    """The variables of .env."""
    lines = (ROOT / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def variables(path: Path) -> dict[str, str]:
    """Variables of a compose file with their defaults."""
    return dict(VARIABLE.findall(path.read_text()))


def services(path: Path, **shell: str) -> dict[str, dict[str, Any]]:
    """Services of a compose file, with the variables of a shell and of .env."""
    known = dotenv() | shell
    text = VARIABLE.sub(lambda match: known.get(match[1], match[2]), path.read_text())
    assert "$" not in text, "every variable has a default: ${NAME:-default}"
    return yaml.safe_load(text)["services"]


def servers(path: Path, **shell: str) -> dict[str, dict[str, Any]]:
    """Those that run all the time."""
    return {name: service for name, service in services(path, **shell).items() if "profiles" not in service}


def seconds(duration: str) -> float:
    """Seconds of a duration such as "90s"."""
    number, unit = re.fullmatch(r"(\d+)(s|m)", duration).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return float(number) * {"s": 1, "m": 60}[unit]


def module(service: dict[str, Any]) -> str:
    """What `python -m` runs; empty for other programs."""
    command = service["command"]
    return command[2] if command[:2] == ["python", "-m"] else ""


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Path in the container → volume and whether it may be written."""
    found = {}
    for mount in service.get("volumes", ()):
        source, target, *mode = mount.split(":")
        found[target] = (source, mode != ["ro"])
    return found


@dataclass(frozen=True)
class Dockerfile:
    """An image's recipe. `lines`: instruction and rest, continuation lines joined."""

    path: Path
    lines: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        """Reads a file of the simple form that ours have."""
        text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
        joined = re.sub(r"\\\n\s*", "", text).splitlines()
        return cls(path, tuple((line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined if line))

    def all(self, instruction: str) -> list[str]:
        """Rests of every line of an instruction."""
        return [rest for name, rest in self.lines if name == instruction]

    @property
    def stages(self) -> set[str]:
        """Names of build stages."""
        return {rest.split(" AS ")[1] for rest in self.all("FROM") if " AS " in rest}

    @property
    def bases(self) -> list[str]:
        """Images that it starts from, its own stages left out."""
        return [image for rest in self.all("FROM") if (image := rest.split(" ")[0]) not in self.stages]

    @property
    def sources(self) -> list[str]:
        """What it copies from the repository."""
        return [source for rest in self.all("COPY") if "--from" not in rest for source in rest.split()[:-1]]

    @property
    def pins(self) -> dict[str, str]:
        """Packages that its commands name with their versions."""
        return dict(re.findall(r"([\w-]+)==([\w.]+)", " ".join(self.all("RUN"))))

    @property
    def extras(self) -> set[str]:
        """Extras of pyproject.toml that it installs."""
        return set(re.findall(r"--extra ([\w-]+)", " ".join(self.all("RUN"))))


def dockerfile(service: dict[str, Any], compose: Path) -> Dockerfile:
    """The recipe of a service's image."""
    build = service["build"]
    return Dockerfile.read((compose.parent / build["context"]).resolve() / build["dockerfile"])
