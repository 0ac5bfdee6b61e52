"""What stands in the files: no machine's paths, no unknown hosts, no dead links, no marks of unfinished work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .tree import ROOT, name_of, text_of, tracked_files

KNOWN_HOSTS = {
    "127.0.0.1", "localhost", "arxiv.org", "buf.build", "docs.astral.sh", "download.pytorch.org", "ghcr.io",
    "github.com", "grpc.io", "huggingface.co", "json-schema.org", "keepachangelog.com", "pypi.org", "pytorch.org",
    "semver.org", "docs.sglang.ai", "www.apache.org", "www.w3.org",
}  # fmt: skip
"""Public hosts that files may name. A private one must never get in here."""
HOST = re.compile(r"https?://([A-Za-z0-9][A-Za-z0-9.-]*)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Put together here, so that this file does not name what it looks for.
MARKS = "|".join(head + tail for head, tail in (("TO", "DO"), ("FIX", "ME"), ("X", "XX"), ("HA", "CK")))
UNFINISHED = re.compile(rf"\b({MARKS})\b|raise NotImplementedError(\(\))?$")
USER_HOME = re.compile(r"(?<![\w.])/(?:home|Users)/\w+")


def lines_with(pattern: re.Pattern[str] | str, files=None) -> list[str]:
    """file:line of every hit."""
    compiled = re.compile(re.escape(pattern)) if isinstance(pattern, str) else pattern
    return [
        f"{name_of(path)}:{number}: {line.strip()[:100]}"
        for path in (files or tracked_files())
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if compiled.search(line)
    ]


def test_no_path_of_a_machine():
    places = {str(ROOT), str(Path.home()), sys.prefix} - {"/", "/usr", "/usr/local"}
    for place in places:
        assert not lines_with(re.compile(rf"(?<![\w.]){re.escape(place)}(?![\w.-])"))
    assert not lines_with(USER_HOME)


def test_only_known_hosts():
    unknown = {
        f"{name_of(path)}: {host}"
        for path in tracked_files()
        for host in HOST.findall(text_of(path))
        if host.lower() not in KNOWN_HOSTS and "." in host
    }
    assert not unknown, "if they are public and right, add them to KNOWN_HOSTS"


def test_no_marks_of_unfinished_work():
    assert not lines_with(
        UNFINISHED, [f for f in tracked_files() if f.suffix in (".py", ".proto", ".sh", ".md", ".yaml")]
    )


def test_no_dead_links():
    dead = []
    for path in (f for f in tracked_files() if f.suffix == ".md"):
        for target in LINK.findall(FENCE.sub("", text_of(path))):
            place = target.partition("#")[0]
            if place and "://" not in place and not place.startswith("mailto:"):
                base = ROOT if place.startswith("/") else path.parent
                if not (base / place.lstrip("/")).exists():
                    dead.append(f"{name_of(path)}: {target}")
    assert not dead


def test_ruff_has_nothing_to_say():
    ruff = str(Path(sys.executable).parent / "ruff")
    for command in (["check", "--output-format=concise"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
