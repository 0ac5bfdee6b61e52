"""`python -m services.buffer [--config FILE] [--set key=value]`: one buffer server."""

from __future__ import annotations

import asyncio

from services.buffer.config import BufferSettings
from services.common.errors import ServiceError
from services.common.settings import exit_with, parse_settings
from services.common.telemetry import configure_logging


def main() -> None:
    """Entry of the process."""
    settings = parse_settings(BufferSettings, prog="tetrarch-buffer", env_prefix="TETRARCH_BUFFER_")
    configure_logging("buffer", settings.log_level, settings.log_json)
    from services.buffer.app import serve

    try:
        asyncio.run(serve(settings))
    except ServiceError as error:
        exit_with(f"tetrarch-buffer: {error}")


if __name__ == "__main__":
    main()
