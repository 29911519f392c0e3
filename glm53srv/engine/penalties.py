"""Penalties and bias of one sequence. They touch the ids that were seen or named, never the whole row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from glm53srv.request import SamplingParams

IdArray = NDArray[np.int64]
Logits = NDArray[np.float32]


class Penalties:
    """Repetition, frequency and presence penalty, then logit_bias. Engine thread only.

    Invariant: the tallies hold the tokens of the start and every one counted since.
    """

    def __init__(
        self, params: SamplingParams, num_ids: int, prompt_ids: Iterable[int], output_ids: Iterable[int]
    ) -> None:
        """Count what is there. Ids outside [0, num_ids) are ignored."""
        self._params = params
        self._seen: TokenTally | None = None
        self._output: TokenTally | None = None
        output = valid_ids(output_ids, num_ids)
        if params.repetition_penalty != 1.0:
            self._seen = TokenTally(np.concatenate([valid_ids(prompt_ids, num_ids), output]), num_ids)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._output = TokenTally(output, num_ids)
        biases: dict[int, np.float32] = {}
        for token_id, bias in params.logit_bias:
            if 0 <= token_id < num_ids:
                biases[token_id] = biases.get(token_id, np.float32(0.0)) + np.float32(bias)
        self._biased_ids = np.fromiter(biases, dtype=np.int64)
        self._biases = np.array(list(biases.values()), dtype=np.float32)

    @property
    def is_neutral(self) -> bool:
        """Tell whether apply() never does anything."""
        return self._seen is None and self._output is None and len(self._biases) == 0

    def apply(self, row: Logits) -> None:
        """Change the logits (num_ids,) in place."""
        params = self._params
        if self._seen is not None:
            ids = self._seen.ids
            seen = row[ids]
            row[ids] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        if self._output is not None:
            ids = self._output.ids
            # Counts times penalty in float64, the rest in float32.
            penalised = (row[ids] - np.float32(params.frequency_penalty) * self._output.counts).astype(
                np.float32
            )
            row[ids] = penalised - np.float32(params.presence_penalty)
        if len(self._biases):
            row[self._biased_ids] += self._biases

    def count(self, token_id: int) -> None:
        """Take a token of the output."""
        if self._seen is not None:
            self._seen.add(token_id)
        if self._output is not None:
            self._output.add(token_id)


class TokenTally:
    """Which ids came, in the order in which they first came, and how often. Adding one is cheap."""

    def __init__(self, ids: IdArray, num_ids: int) -> None:
        """ids: what there is, each in [0, num_ids)."""
        counts = np.bincount(ids, minlength=num_ids)
        first = np.flatnonzero(counts)
        self._num = len(first)
        capacity = max(1024, 2 * self._num)
        self._ids = np.empty(capacity, dtype=np.int64)
        self._counts = np.empty(capacity, dtype=np.int32)
        self._ids[: self._num] = first
        self._counts[: self._num] = counts[first]
        self._place_of: dict[int, int] = {token_id: place for place, token_id in enumerate(first.tolist())}

    @property
    def ids(self) -> IdArray:
        """The ids, each once; borrowed until the next add()."""
        return self._ids[: self._num]

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often each of `ids` came; borrowed until the next add()."""
        return self._counts[: self._num]

    def add(self, token_id: int) -> None:
        """Count one token."""
        place = self._place_of.setdefault(token_id, self._num)
        if place < self._num:
            self._counts[place] += 1
            return
        if self._num == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._ids[place], self._counts[place] = token_id, 1
        self._num += 1


def valid_ids(ids: Iterable[int], num_ids: int) -> IdArray:
    """Give those of [0, num_ids), in order."""
    array = np.fromiter(ids, dtype=np.int64)
    return array[(array >= 0) & (array < num_ids)]
