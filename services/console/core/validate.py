"""Everything about a run that can be checked before anything starts, cheapest first.

Knows files of this machine, not services: addresses and ports are checked where they are opened.
"""

from __future__ import annotations

from services.common.run_spec import RunSpec
from services.console.core.check_code import check_code
from services.console.core.check_data import check_data
from services.console.core.check_model import check_model
from services.console.core.check_places import check_places


def validate(spec: RunSpec) -> None:
    """Raises SettingsError, one sentence naming key, value and remedy."""
    check_places(spec)
    check_model(spec)
    check_code(spec)
    check_data(spec.data)
