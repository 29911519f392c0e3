"""Sequence: what it computes next and when it ends."""

from __future__ import annotations

import pytest

from glm53srv.request import FinishReason, SamplingParams
from glm53srv.scheduler.sequence import Sequence, SequenceState
from tests.builders import EOS_ID, make_request

STOP_ID = 9


def make_sequence(
    num_prompt: int = 3,
    *,
    sampling: SamplingParams | None = None,
    max_output_tokens: int = 100,
) -> Sequence:
    return Sequence(
        0,
        make_request(num_prompt=num_prompt, sampling=sampling),
        seed=5,
        eos_token_ids=(EOS_ID,),
        max_output_tokens=max_output_tokens,
        submitted_s=1.0,
    )


def decoding(sequence: Sequence) -> Sequence:
    sequence.admit(0, 0, 2.0)
    sequence.num_computed_tokens = sequence.num_tokens
    sequence.begin_decoding()
    return sequence


def test_chunks_end_on_the_grid_and_at_the_last_token() -> None:
    sequence = make_sequence(21)
    ends = []
    while sequence.num_computed_tokens < sequence.num_tokens:
        sequence.num_computed_tokens = sequence.chunk_end(8)
        ends.append(sequence.num_computed_tokens)
    assert ends == [8, 16, 21]


def test_tokens_between_spans_prompt_and_output() -> None:
    sequence = decoding(make_sequence(3))
    for token_id in (20, 21, 22):
        sequence.add_token(token_id, 3.0)
    everything = (2, 3, 4, 20, 21, 22)
    for begin in range(7):
        for end in range(begin, 7):
            assert sequence.tokens_between(begin, end) == everything[begin:end]


def test_end_id_stops() -> None:
    assert decoding(make_sequence()).add_token(EOS_ID, 3.0) == (FinishReason.STOP, True)


def test_ignore_eos_drops_the_checkpoints_end_ids_and_not_the_requests() -> None:
    sequence = decoding(make_sequence(sampling=SamplingParams(ignore_eos=True, stop_token_ids=(STOP_ID,))))
    assert sequence.add_token(EOS_ID, 3.0) == (None, False)
    assert sequence.add_token(STOP_ID, 3.0) == (FinishReason.STOP, True)


def test_stop_id_counts_after_min_tokens_only() -> None:
    sequence = decoding(make_sequence(sampling=SamplingParams(min_tokens=2)))
    assert sequence.add_token(EOS_ID, 3.0) == (None, False)
    assert sequence.add_token(7, 3.0) == (None, False)
    assert sequence.add_token(EOS_ID, 3.0) == (FinishReason.STOP, True)


def test_token_limit_ends_with_length_and_a_stop_id_there_with_stop() -> None:
    sequence = decoding(make_sequence(max_output_tokens=2))
    sequence.add_token(7, 3.0)
    assert sequence.add_token(8, 3.0) == (FinishReason.LENGTH, False)
    sequence = decoding(make_sequence(max_output_tokens=1))
    assert sequence.add_token(EOS_ID, 3.0) == (FinishReason.STOP, True)


def test_times_are_those_of_the_first_and_the_last_token() -> None:
    sequence = decoding(make_sequence())
    for now_s in (3.0, 4.0, 5.0):
        sequence.add_token(7, now_s)
    times = (sequence.submitted_s, sequence.first_scheduled_s, sequence.first_token_s, sequence.last_token_s)
    assert times == (1.0, 2.0, 3.0, 5.0)


def test_preemption_keeps_tokens_and_first_times() -> None:
    sequence = decoding(make_sequence())
    sequence.add_token(7, 3.0)
    sequence.drop_cache()
    sequence.preempt()
    assert sequence.state is SequenceState.QUEUED
    assert sequence.start().output_ids == (7,)
    sequence.admit(1, 9, 8.0)
    assert sequence.first_scheduled_s == 2.0
    assert sequence.chunk_end(100) == 4


@pytest.mark.parametrize("state", [SequenceState.FINISHED, SequenceState.ABORTED])
def test_final_states_are_final(state: SequenceState) -> None:
    sequence = decoding(make_sequence())
    sequence.end(state)
    assert not sequence.is_live
    with pytest.raises(AssertionError):
        sequence.end(SequenceState.ABORTED)
    with pytest.raises(AssertionError):
        sequence.add_token(7, 3.0)
