"""`python -m services.rollout`: parses settings, then imports the rest and runs."""

from __future__ import annotations

import asyncio

from services.common.settings import exit_with, parse_settings
from services.rollout.config import RolloutNodeSettings


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    settings = parse_settings(RolloutNodeSettings, argv, prog="tetrarch-rollout", env_prefix="TETRARCH_ROLLOUT_")

    from services.common.errors import ServiceError
    from services.common.telemetry import configure_logging
    from services.rollout.app import serve

    configure_logging("rollout", settings.log_level, settings.log_json)
    try:
        asyncio.run(serve(settings))
    except ServiceError as error:
        exit_with(f"tetrarch-rollout: {error}")


if __name__ == "__main__":
    main()
