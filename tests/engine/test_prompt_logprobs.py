"""Prompt log probabilities of the CPU engine: against the whole sequence at once, and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glm53srv.engine.cpu import CpuEngine, EngineOptions
from glm53srv.engine.sampler import LOGPROB_FLOOR, SamplerBank
from glm53srv.kernels import KernelPool
from glm53srv.model.decoder import Decoder
from glm53srv.model.linear import KernelContext
from glm53srv.model.loading import load_decoder
from glm53srv.model.ops import F32
from glm53srv.request import PromptLogprobs
from tests.builders import make_start
from tests.engine.plans import Driver, Stream

LENGTH = 150
BLOCK_ROWS = 32
"""Most rows of logits at once; engine/cpu.py says why."""


class CountingDecoder(Decoder):
    """The same decoder, which notes how many rows of logits are asked for at once."""

    def __init__(self, decoder: Decoder) -> None:
        self.__dict__.update(decoder.__dict__)
        self.rows: list[int] = []

    def logits(self, streams: F32) -> F32:
        self.rows.append(len(streams))
        return super().logits(streams)


@pytest.fixture(scope="module")
def decoder(random_model_dir: Path) -> Iterator[CountingDecoder]:
    pool = KernelPool(1)
    yield CountingDecoder(load_decoder(random_model_dir, KernelContext(pool)))
    pool.close()


@pytest.fixture
def engine(decoder: CountingDecoder) -> CpuEngine:
    vocab_size = decoder.config.vocab_size
    sampler = SamplerBank(vocab_size, decoder.config.eos_token_ids)
    pool = KernelPool(1)  # the engine closes the pool that it is given; the decoder's own lives on
    decoder.rows.clear()
    return CpuEngine(decoder, pool, sampler, EngineOptions(cache_tokens=1024, max_chunk_tokens=64))


def judged(engine: CpuEngine, ids: tuple[int, ...], wanted: PromptLogprobs) -> Stream:
    stream = Stream(0, ids, (0,), prompt_logprobs=wanted)
    Driver(engine).prefill(stream)
    engine.close()
    return stream


def test_prompt_logprobs_are_those_of_the_whole_sequence_at_once(
    decoder: CountingDecoder, engine: CpuEngine
) -> None:
    ids = tuple(int(token) for token in np.random.default_rng(3).integers(256, 2256, LENGTH))
    stream = judged(engine, ids, PromptLogprobs(1, num_top=3, token_ids=(300,)))
    logits = decoder.forward(ids)[:-1].astype(np.float64)
    expected = logits - logits.max(axis=1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
    assert len(stream.judged) == LENGTH - 1
    rows = np.arange(LENGTH - 1)
    # float32 sums in chunks of 64 against one chunk of 150: the last bits differ
    np.testing.assert_allclose([entry.logprob for entry in stream.judged], expected[rows, ids[1:]], atol=1e-3)
    np.testing.assert_allclose([entry.others[0][1] for entry in stream.judged], expected[:, 300], atol=1e-3)
    np.testing.assert_allclose(
        [[value for _, value in entry.top] for entry in stream.judged],
        -np.sort(-expected, axis=1)[:, :3],
        atol=1e-3,
    )


def test_logits_of_a_chunk_never_exist_whole(decoder: CountingDecoder, engine: CpuEngine) -> None:
    ids = tuple(range(300, 300 + LENGTH))
    stream = judged(engine, ids, PromptLogprobs(5))
    assert len(stream.judged) == LENGTH - 5
    assert max(decoder.rows) <= BLOCK_ROWS
    assert sum(decoder.rows) == LENGTH - 5 + 1  # the wanted ones, and the row that is sampled from


def test_a_prompt_token_without_meaning_has_the_floor() -> None:
    bank = SamplerBank(8, (1,), num_valid_ids=6)
    start = make_start(prompt_ids=(2, 7, 3))
    bank.start(0, replace(start, prompt_logprobs=PromptLogprobs(1, 2, (6,))))
    first, second = bank.judge_prompt(0, range(1, 3), np.zeros((2, 8), dtype=np.float32))
    assert first.logprob == LOGPROB_FLOOR
    assert second.logprob == pytest.approx(-np.log(6))
    assert first.others == ((6, LOGPROB_FLOOR),)
