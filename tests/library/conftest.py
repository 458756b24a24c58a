"""What a quiet model leaves behind in the process goes with its test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    logger = logging.getLogger("llamado")
    level = logger.level
    yield
    logger.setLevel(level)
