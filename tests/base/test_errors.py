"""Tests of the sentences that errors of the system and of libraries become."""

from __future__ import annotations

import pytest

from cbatch.base.errors import ConfigError, first_line, os_errors_as


@pytest.mark.parametrize(
    ("error", "reason"), [(FileNotFoundError(2, "No such file", "a"), "No such file"), (OSError("torn"), "torn")]
)
def test_an_error_without_a_number_has_a_reason(error: OSError, reason: str) -> None:
    """Guards the person against “Cannot open: None.”, for errors that a library makes of a text alone."""
    with pytest.raises(ConfigError, match=rf"^Cannot open: {reason}\.$"), os_errors_as(ConfigError, "Cannot open"):
        raise error


def test_an_error_without_a_message_has_a_line() -> None:
    """Guards the report of a damaged file against an IndexError, if the library gives no reason."""
    assert first_line(ValueError(" \n")) == "ValueError"
    assert first_line(ValueError("\n first.\nsecond")) == "first."
