"""One Ray head for the whole session: starting Ray costs more than the trainings that tests do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.running import environment, ray_head


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[dict[str, str]]:
    """Environment in which `trireme` uses the session's Ray head."""
    with ray_head() as address:
        yield environment(RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
