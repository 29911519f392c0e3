"""Invariants over all sequences, checked after every action in tests and on demand in a running server."""

from __future__ import annotations

from collections.abc import Sequence as Items
from collections.abc import Set

from glm53srv.engine.base import EngineLimits
from glm53srv.scheduler.kv_pages import PagePool
from glm53srv.scheduler.sequence import Sequence, SequenceState


def check_sequences(waiting: Items[Sequence], admitted: Items[Sequence], limits: EngineLimits) -> None:
    """Raise AssertionError unless order, states and counters agree with the tables of sequence.py."""
    ages = [sequence.sequence_id for sequence in (*admitted, *waiting)]
    require(ages == sorted(set(ages)), f"admitted, then waiting, are not in order of age: {ages}")
    require(len(admitted) <= limits.max_streams, f"{len(admitted)} sequences are admitted")
    for sequence in waiting:
        name = f"waiting sequence {sequence.sequence_id}"
        require(sequence.state is SequenceState.QUEUED, f"{name} is {sequence.state}")
        require(sequence.slot is None, f"{name} has slot {sequence.slot}")
        require(not sequence.page_ids, f"{name} has pages")
        require(sequence.num_computed_tokens == 0, f"{name} has computed tokens")
    for sequence in admitted:
        name = f"admitted sequence {sequence.sequence_id}"
        computed, total = sequence.num_computed_tokens, sequence.num_tokens
        if sequence.state is SequenceState.PREFILLING:
            on_grid = computed < total and computed % limits.max_chunk_tokens == 0
            require(on_grid, f"{name} prefills at {computed} of {total}")
        else:
            require(sequence.state is SequenceState.DECODING, f"{name} is {sequence.state}")
            require(computed == total - 1, f"{name} decodes with {computed} of {total} tokens computed")
        held = len(sequence.page_ids) * limits.page_tokens
        require(held >= computed, f"{name} has computed {computed} tokens in pages for {held}")
        require(held < total + limits.page_tokens, f"{name} hoards pages: {held} for {total} tokens")
        is_within = len(sequence.output_ids) < max(sequence.max_output_tokens, 1)
        require(is_within, f"{name} lives beyond its token limit")


def check_slots(
    admitted: Items[Sequence], free: Set[int], ended: Set[int], in_flight: Set[int], limits: EngineLimits
) -> None:
    """Raise AssertionError unless every slot is free, or one sequence's, or about to be released.

    in_flight: slots of the step in flight; they may be in use or about to be released, never free.
    """
    used = [sequence.slot for sequence in admitted if sequence.slot is not None]
    everywhere = [*free, *ended, *used]
    require(len(used) == len(admitted), "an admitted sequence has no slot")
    require(sorted(everywhere) == list(range(limits.max_streams)), f"slots {everywhere} are not a partition")
    require(in_flight.isdisjoint(free), f"slots {in_flight} are in flight, of which some count as free")


def check_pages(pool: PagePool, admitted: Items[Sequence]) -> None:
    """Raise AssertionError unless exactly the pages of the admitted sequences are taken."""
    pool.check_integrity({sequence.sequence_id: sequence.page_ids for sequence in admitted})


def require(condition: bool, reason: str) -> None:
    """Raise AssertionError; unlike assert, also under python -O."""
    if not condition:
        raise AssertionError(reason)
