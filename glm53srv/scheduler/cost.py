"""What a step will take, learned from the steps before it, and how many layers of a prefill fit into one."""

from __future__ import annotations

import math
from collections.abc import Sequence

SMOOTHING = 0.3
"""Weight of the newest measurement. Chosen so that a change of load is followed within a few steps while one
outlier (a first run that compiles, a page fault storm) is forgotten within about ten."""


class StepCosts:
    """Measured seconds of prefill layers and decode steps. Owned by Scheduler.

    A layer costs a fixed part (its weights are read) and a part per token, so one number per token would be
    wrong by orders of magnitude between a chunk of 5 tokens and one of 8,192. Kept instead: seconds per token
    for each power of two of the chunk's length and each layer, and seconds of a decode step by its rows.

    Layers are told apart because they differ: in 512 tokens of a long prompt a latent attention layer took
    114 ms and a linear one 14 (CPU engine, random model, 2-core EPYC VM, 2026-11). With one mean for all, as
    before, a slice that held both latent layers made a gap of 355 ms where 200 were wanted. A layer that
    became slower counts at once, one that became faster is believed slowly: latent layers cost more with
    every chunk of a prompt, and a slice that is too small harms nobody.
    """

    def __init__(self) -> None:
        self._layer_token_s: dict[int, dict[int, float]] = {}  # by power of two, then by layer
        self._decode_s: dict[int, float] = {}

    def observe_prefill(
        self, num_tokens: int, layers: range, seconds: float, seconds_of_layer: Sequence[float] = ()
    ) -> None:
        """Learn from a slice of some layers of a chunk of num_tokens tokens.

        seconds_of_layer: one for each layer, or nothing from an engine that knows their sum only; that is
        divided as the layers are known to differ.
        """
        if not seconds_of_layer:
            known = [self.layer_s(num_tokens, layer) for layer in layers]
            total_s = sum(estimate or 0.0 for estimate in known)
            if None in known or total_s <= 0.0:
                known, total_s = [1.0] * len(layers), float(len(layers))
            seconds_of_layer = [seconds * (estimate or 0.0) / total_s for estimate in known]
        table = self._layer_token_s.setdefault(num_tokens.bit_length(), {})
        for layer, layer_s in zip(layers, seconds_of_layer, strict=True):
            token_s = layer_s / num_tokens
            if token_s > table.get(layer, -1.0):
                table[layer] = token_s
            else:
                _smooth(table, layer, token_s)

    def observe_decode(self, num_rows: int, seconds: float) -> None:
        """Learn from a decode step of num_rows rows."""
        _smooth(self._decode_s, num_rows, seconds)

    def layer_s(self, num_tokens: int, layer: int) -> float | None:
        """Estimate the seconds of one layer of a chunk; None before its first measurement.

        Another length's number is used in the way that estimates too much rather than too little: per token
        from a shorter chunk, per layer from a longer one.
        """
        size = num_tokens.bit_length()
        known = {length: table[layer] for length, table in self._layer_token_s.items() if layer in table}
        if size in known:
            return known[size] * num_tokens
        shorter = [length for length in known if length < size]
        if shorter:
            return known[max(shorter)] * num_tokens
        if known:
            nearest = min(known)
            return known[nearest] * (1 << nearest)
        return None

    def decode_s(self, num_rows: int) -> float:
        """Estimate the seconds of a decode step; 0 for no rows and before the first measurement."""
        if num_rows == 0 or not self._decode_s:
            return 0.0
        return self._decode_s[min(self._decode_s, key=lambda known: abs(known - num_rows))]

    def layers_within(self, budget_s: float, num_tokens: int, layers: range, *, is_watched: bool) -> int:
        """Count how many of a chunk's next layers fit into budget_s: at least 1, at most all of them.

        is_watched: streams wait for the end of the step. Then a layer that was never measured runs alone, the
        measurement comes with it; else it is taken to cost as much as the slowest known one.
        """
        left_s = max(budget_s, 0.0)
        guess_s = None if is_watched else self._slowest_s(num_tokens)
        for count, layer in enumerate(layers):
            layer_s = self.layer_s(num_tokens, layer)
            if layer_s is None:
                layer_s = guess_s
            if layer_s is None or layer_s > left_s:
                return max(count, 1)
            left_s -= layer_s
        return len(layers)

    def _slowest_s(self, num_tokens: int) -> float | None:
        known = {layer for table in self._layer_token_s.values() for layer in table}
        return max((self.layer_s(num_tokens, layer) or 0.0 for layer in known), default=None)


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
