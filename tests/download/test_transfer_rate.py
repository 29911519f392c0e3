"""Amount, rate and time left, as a person reads them."""

from __future__ import annotations

import pytest

from glm53srv.transfer_rate import TransferRate, format_time


def test_rate_and_rest_are_those_of_the_last_seconds() -> None:
    now = 0.0
    rate = TransferRate(100_000_000_000, lambda: now)
    assert rate.text(0) == "0.00 of 100.00 GB"
    now = 10.0
    assert rate.text(10_000_000_000) == "10.00 of 100.00 GB, 1.00 GB/s, 90 s left"
    now = 40.0  # the first ten seconds are out of the window
    assert rate.text(13_000_000_000) == "13.00 of 100.00 GB, 0.10 GB/s, 14 min left"


def test_a_resumed_transfer_does_not_count_what_was_there() -> None:
    now = 0.0
    rate = TransferRate(100_000_000_000, lambda: now)
    rate.text(50_000_000_000)
    now = 1.0
    assert rate.text(51_000_000_000) == "51.00 of 100.00 GB, 1.00 GB/s, 49 s left"


def test_no_rate_is_named_while_nothing_comes() -> None:
    now = 0.0
    rate = TransferRate(2_000_000_000, lambda: now)
    rate.text(1_000_000_000)
    now = 5.0
    assert rate.text(1_000_000_000) == "1.00 of 2.00 GB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (42.4, "42 s"), (99.4, "99 s"), (99.6, "2 min"), (3600, "60 min"), (7500, "2 h 05 min")],
)
def test_times(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
