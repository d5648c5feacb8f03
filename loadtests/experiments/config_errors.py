"""Errors of the rooms below, as those of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from servers.fields import ConfigError


@contextmanager
def as_config_error(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """What is raised inside, of one of the `kinds`, leaves as a ConfigError with `prefix` in front of its words."""
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{prefix}{error}") from None
