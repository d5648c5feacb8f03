"""Errors of lower floors, as errors of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from servers.complaint import ConfigError


@contextmanager
def as_config_error(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """An error inside of one of the `kinds` is raised as a ConfigError, with `prefix` before its message."""
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{prefix}{error}") from None
