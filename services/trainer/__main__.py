"""`python -m services.trainer`: parses settings, then imports the rest and runs."""

from __future__ import annotations

import asyncio

from services.common.settings import exit_with, parse_settings
from services.trainer.config import TrainerServiceSettings


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    settings = parse_settings(TrainerServiceSettings, argv, prog="tetrarch-trainer", env_prefix="TETRARCH_TRAINER_")

    from services.common.errors import ServiceError
    from services.common.telemetry import configure_logging
    from services.trainer.app import App

    configure_logging("trainer", settings.log_level, settings.log_json)

    async def run() -> None:
        await App(settings).run()

    try:
        asyncio.run(run())
    except ServiceError as error:
        exit_with(f"tetrarch-trainer: {error}")


if __name__ == "__main__":
    main()
