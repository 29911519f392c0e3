"""The whole model over the random checkpoint: against float64, in chunks, and token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.decoder import Decoder
from glm53srv.model.plan import page_bytes, plan_memory, state_bytes
from glm53srv.model.state import PAGE_TOKENS, PagedCache, SequenceState, view_of
from glm53srv.model.tensor_needs import all_needs
from reference.model import ReferenceModel
from tests.model.goldens import Goldens, row_errors

TOLERANCE = 1e-4
PAGES = (1, 0)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 2256, count)]


@pytest.fixture(scope="module")
def golden_whole(golden_decoder: Decoder, goldens: Goldens) -> NDArray[np.float32]:
    """Give the logits of the small model over all its tokens in one chunk."""
    return golden_decoder.forward(goldens.token_ids)


@pytest.fixture(scope="module")
def random_whole(random_decoder: Decoder) -> NDArray[np.float32]:
    """Give the logits of the random model over 300 tokens in one chunk."""
    return random_decoder.forward(random_ids(300))


def run_in_chunks(decoder: Decoder, token_ids: list[int], chunk: int) -> NDArray[np.float32]:
    """Give the logits at every position, computed chunk by chunk over a paged cache."""
    state, cache = SequenceState(decoder.config), PagedCache(decoder.config, len(PAGES))
    logits = []
    for first in range(0, len(token_ids), chunk):
        ids = token_ids[first : first + chunk]
        sequence, streams = view_of(state, PAGES, first), decoder.embed(ids)
        for layer in range(decoder.config.num_layers):
            streams = decoder.prefill_block(layer, streams, sequence, cache)
        logits.append(decoder.logits(streams))
    return np.concatenate(logits)


def run_by_token(decoder: Decoder, token_ids: list[int]) -> NDArray[np.float32]:
    """Give the logits at every position, every token through the decode path."""
    state, cache = SequenceState(decoder.config), PagedCache(decoder.config, len(PAGES))
    logits = []
    for position, token_id in enumerate(token_ids):
        streams = decoder.embed([token_id])
        for layer in range(decoder.config.num_layers):
            streams = decoder.decode_block(layer, streams, [view_of(state, PAGES, position)], cache)
        logits.append(decoder.logits(streams))
    return np.concatenate(logits)


def test_every_block_matches_float64_in_the_dense_and_the_sparse_range(
    random_decoder: Decoder, random_model_dir: Path
) -> None:
    reference = ReferenceModel(random_model_dir)
    assert random_decoder.config.indexer.topk_tokens + 8 < 280  # the last positions cut pools
    streams = reference.embed(random_ids(280))
    for layer in range(random_decoder.config.num_layers):
        expected = reference.block(layer, streams)
        actual = random_decoder.block(layer, streams.astype(np.float32))
        assert row_errors(actual, expected).max() < TOLERANCE
        streams = expected


def test_logits_match_float64(random_decoder: Decoder, random_model_dir: Path) -> None:
    ids = random_ids(24)
    expected = ReferenceModel(random_model_dir).forward(ids)
    assert row_errors(random_decoder.forward(ids), expected).max() < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_matches_the_whole(
    random_decoder: Decoder, random_whole: NDArray[np.float32], chunk: int
) -> None:
    assert row_errors(run_in_chunks(random_decoder, random_ids(300), chunk), random_whole).max() < TOLERANCE


def test_decoding_token_by_token_matches_the_whole(
    random_decoder: Decoder, random_whole: NDArray[np.float32]
) -> None:
    assert row_errors(run_by_token(random_decoder, random_ids(300)), random_whole).max() < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_golden_model_in_chunks_matches_its_whole_and_the_goldens(
    golden_decoder: Decoder, golden_whole: NDArray[np.float32], goldens: Goldens, chunk: int
) -> None:
    logits = run_in_chunks(golden_decoder, goldens.token_ids, chunk)
    # All 300 positions: equal scores are equal in every chunk, and then the lowest pool wins.
    assert row_errors(logits, golden_whole).max() < TOLERANCE
    assert row_errors(logits[:67], goldens.logits[:67]).max() < TOLERANCE


def test_golden_model_token_by_token_matches_its_whole_and_the_goldens(
    golden_decoder: Decoder, golden_whole: NDArray[np.float32], goldens: Goldens
) -> None:
    logits = run_by_token(golden_decoder, goldens.token_ids)
    assert row_errors(logits, golden_whole).max() < TOLERANCE
    assert row_errors(logits[:67], goldens.logits[:67]).max() < TOLERANCE


def test_memory_plan_adds_up(random_decoder: Decoder, random_model_dir: Path) -> None:
    config = random_decoder.config
    weight_bytes = Checkpoint(random_model_dir).needed_bytes(all_needs(config))
    file_bytes = (random_model_dir / "model.safetensors").stat().st_size
    assert 0.97 * file_bytes < weight_bytes < file_bytes  # all but header and codebook scalars
    state = SequenceState(config)
    arrays = [array for kda in state.kda.values() for array in (kda.conv, kda.matrix)]
    arrays += [array for tail in state.tails.values() for array in (tail.keys, tail.gates)]
    assert state_bytes(config) == sum(array.nbytes for array in arrays)
    assert page_bytes(config) == 2 * 4 * (256 * 128 + 64 * 128)
    plan = plan_memory(config, weight_bytes, num_pages=32, max_streams=4, max_chunk_tokens=512)
    assert plan.cache_bytes == 32 * page_bytes(config)
    assert plan.state_bytes == 4 * state_bytes(config)
    assert plan.total_bytes == weight_bytes + plan.private_bytes
    assert PAGE_TOKENS == 256
