"""`python -m services.reward [--config FILE] [--set key=value]`."""

from __future__ import annotations

from services.common.settings import exit_with, parse_settings
from services.reward.config import RewardSettings


def main() -> None:
    """Command line entry."""
    settings = parse_settings(RewardSettings, prog="tetrarch-reward", env_prefix="TETRARCH_REWARD_")

    import asyncio

    from services.common.errors import ServiceError
    from services.common.telemetry import configure_logging
    from services.reward.app import RewardApp

    configure_logging("reward", settings.log_level, settings.log_json)

    async def run() -> None:
        await RewardApp(settings).run()

    try:
        asyncio.run(run())
    except ServiceError as error:
        exit_with(f"tetrarch-reward: {error}")


if __name__ == "__main__":
    main()
