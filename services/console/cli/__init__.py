"""The `tetrarch` command."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `tetrarch` command."""
    from services.console.cli.app import run

    run()
