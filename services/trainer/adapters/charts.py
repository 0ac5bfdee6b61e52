"""A run's scalars for TensorBoard, one file of events per writer. Knows no metrics by name.

TensorBoard's own writer ends at the first error of the disk and raises it ever after. This one writes an event at once
and whole; after an error it goes on in a new file, since nothing is read behind a cut event.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.summary.writer.record_writer import RecordWriter


class Charts:
    """Event files in a directory.

    Args:
        directory: made with the first event.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = -1
        self._count = 0

    def write(self, event: Event) -> None:
        """Appends one event. Raises OSError; the event is lost then, later ones are not."""
        try:
            if self._file < 0:
                self._file = self._new_file()
                source = SourceMetadata(writer="tetrarch")
                self._append(Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source))
            self._append(event)
        except OSError:
            self.close()
            raise

    def _new_file(self) -> int:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._count += 1
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{self._count}"
        return os.open(self._directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _append(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        data = record.getvalue()
        if (written := os.write(self._file, data)) != len(data):
            raise OSError(f"{written} of {len(data)} bytes of an event were written")

    def close(self) -> None:
        """Ends the file; the next event begins another."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = -1
