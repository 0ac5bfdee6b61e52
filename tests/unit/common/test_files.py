"""Files that are there whole or not at all."""

from __future__ import annotations

import pytest

from services.common.files import write_whole
from services.console.cli.app import exit_code
from tests.support.small_disk import disk_at


def test_a_full_disk_leaves_the_file_as_it_was_and_is_named(tmp_path):
    with disk_at(tmp_path / "disk", 1 << 20) as disk:
        path = disk.path / "run" / "run.yaml"
        write_whole(path, b"first")
        disk.fill()
        with pytest.raises(OSError, match="No space left on device") as caught:
            write_whole(path, b"second" * 10_000)
        assert caught.value.filename == str(path)
        assert exit_code(caught.value) == 1, "a sentence, no traceback"
        assert path.read_bytes() == b"first"
        disk.make_room()
        write_whole(path, b"second")
        assert path.read_bytes() == b"second"
        assert [found.name for found in path.parent.iterdir()] == ["run.yaml"]


def test_an_error_without_a_file_is_a_bug():
    assert exit_code(BrokenPipeError(32, "Broken pipe")) is None
