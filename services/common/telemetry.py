"""Logs and metrics of a process."""

from __future__ import annotations

import logging
import sys

import structlog
from prometheus_client import start_http_server


def configure_logging(service: str, level: str = "info", json: bool = False) -> None:
    """Sends structlog and standard-library records to stderr, each with the service's name."""
    number = getattr(logging, level.upper(), logging.INFO)
    shared = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
    ]
    renderer = (
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer] if json else [*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(
        level=max(number, logging.WARNING), stream=sys.stderr, format="%(levelname)s %(name)s %(message)s"
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Logger that carries the module's name."""
    return structlog.get_logger(module=name)


def start_metrics_server(port: int) -> None:
    """Serves Prometheus metrics on loopback; port 0 serves none."""
    if port:
        start_http_server(port, addr="127.0.0.1")
