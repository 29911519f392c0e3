"""What a step will take, learned from the steps before it, and how many layers of a prefill fit into one."""

from __future__ import annotations

import math

SMOOTHING = 0.3
"""Weight of the newest measurement. Chosen so that a change of load is followed within a few steps while one
outlier (a first run that compiles, a page fault storm) is forgotten within about ten."""


class StepCosts:
    """Measured seconds of prefill layers and decode steps, smoothed. Owned by Scheduler.

    A layer costs a fixed part (its weights are read) and a part per token, so one number per token would be
    wrong by orders of magnitude between a chunk of 5 tokens and one of 8,192. Kept instead: seconds per layer
    and token for each power of two of the chunk's length, and seconds of a decode step by number of rows.
    """

    def __init__(self) -> None:
        self._layer_token_s: dict[int, float] = {}
        self._decode_s: dict[int, float] = {}

    def observe_prefill(self, num_tokens: int, num_layers: int, seconds: float) -> None:
        """Learn from a slice of num_layers layers of a chunk of num_tokens tokens."""
        _smooth(self._layer_token_s, num_tokens.bit_length(), seconds / (num_layers * num_tokens))

    def observe_decode(self, num_rows: int, seconds: float) -> None:
        """Learn from a decode step of num_rows rows."""
        _smooth(self._decode_s, num_rows, seconds)

    def layer_s(self, num_tokens: int) -> float | None:
        """Estimate the seconds of one layer of a chunk; None before the first measurement.

        Another length's number is used in the way that estimates too much rather than too little: per token
        from a shorter chunk, per layer from a longer one.
        """
        size = num_tokens.bit_length()
        if size in self._layer_token_s:
            return self._layer_token_s[size] * num_tokens
        shorter = [known for known in self._layer_token_s if known < size]
        if shorter:
            return self._layer_token_s[max(shorter)] * num_tokens
        if self._layer_token_s:
            nearest = min(self._layer_token_s)
            return self._layer_token_s[nearest] * (1 << nearest)
        return None

    def decode_s(self, num_rows: int) -> float:
        """Estimate the seconds of a decode step; 0 for no rows and before the first measurement."""
        if num_rows == 0 or not self._decode_s:
            return 0.0
        return self._decode_s[min(self._decode_s, key=lambda known: abs(known - num_rows))]

    def layers_within(self, budget_s: float, num_tokens: int, num_layers_left: int) -> int:
        """Count the layers of a chunk that fit into budget_s: at least 1, at most num_layers_left.

        One layer while nothing is known: the measurement comes with it.
        """
        layer_s = self.layer_s(num_tokens)
        if layer_s is None:
            return 1
        budget_s = max(budget_s, 0.0)
        if layer_s * num_layers_left <= budget_s:
            return num_layers_left
        return max(1, int(budget_s / layer_s))


class Rate:
    """Events per second, averaged with exponentially fading memory. Pure: time comes in.

    After a start from rest it reads 1 - exp(-t / window_s) of the true rate.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._value = 0.0
        self._at_s: float | None = None

    def add(self, count: int, now_s: float) -> None:
        """Count events at a time not before the last one."""
        self._value = self.per_second(now_s) + count / self._window_s
        self._at_s = now_s

    def per_second(self, now_s: float) -> float:
        """Give the rate as of now_s."""
        if self._at_s is None:
            return 0.0
        elapsed = max(now_s - self._at_s, 0.0)
        return self._value * math.exp(-elapsed / self._window_s)


def _smooth(table: dict[int, float], key: int, value: float) -> None:
    known = table.get(key)
    table[key] = value if known is None else known + SMOOTHING * (value - known)
