"""Driving an engine without a scheduler: what it says of a token is the same by prefill and by decode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from glm53srv.engine.cpu import CpuEngine, EngineOptions
from glm53srv.engine.drive import EngineDriver
from glm53srv.engine.fake import FakeEngine
from glm53srv.errors import ConfigError
from glm53srv.kernels import KernelPool
from glm53srv.model.linear import KernelContext
from glm53srv.model.loading import load_decoder
from glm53srv.model.vocabulary import count_token_ids
from glm53srv.request import TokenLogprobs
from tests.builders import make_limits

PROMPT = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)


@pytest.fixture(scope="module")
def cpu_engine(random_model_dir: Path) -> Iterator[CpuEngine]:
    options = EngineOptions(max_streams=2, cache_tokens=2048, max_chunk_tokens=16)
    engine = CpuEngine.load(random_model_dir, options)
    yield engine
    engine.close()


def tops(rows: list[TokenLogprobs]) -> list[tuple[tuple[int, float], ...]]:
    return [row.top for row in rows]


def test_chunks_of_a_prompt_are_judged_as_one() -> None:
    (whole,) = EngineDriver(FakeEngine(make_limits(max_chunk_tokens=16))).open(
        [PROMPT], num_top=3, first_judged=1
    )
    (parts,) = EngineDriver(FakeEngine(make_limits(max_chunk_tokens=4))).open(
        [PROMPT], num_top=3, first_judged=1
    )

    assert len(whole) == len(PROMPT)  # every token but the first, and the one after the last
    assert tops(parts) == tops(whole)


def test_judging_begins_where_it_is_asked_to() -> None:
    (whole,) = EngineDriver(FakeEngine(make_limits(max_chunk_tokens=4))).open(
        [PROMPT], num_top=3, first_judged=1
    )
    (late,) = EngineDriver(FakeEngine(make_limits(max_chunk_tokens=4))).open(
        [PROMPT], num_top=3, first_judged=6
    )
    (none,) = EngineDriver(FakeEngine(make_limits(max_chunk_tokens=4))).open([PROMPT], num_top=3)

    assert tops(late) == tops(whole)[5:]
    assert tops(none) == tops(whole)[-1:]


def test_decode_says_what_a_prefill_of_the_same_tokens_says() -> None:
    driver = EngineDriver(FakeEngine(make_limits()))
    said = driver.open([PROMPT[:6], PROMPT[:3]], num_top=2, room_tokens=4)
    rows = [[*PROMPT[:6]], [*PROMPT[:3]]]
    best = [row[-1].top[0][0] for row in said]
    for _ in range(4):
        for row, token in zip(rows, best, strict=True):
            row.append(token)
        tokens = driver.decode(best)
        best = [token.token_id for token in tokens]
    driver.release()

    again = driver.open(rows, num_top=2)
    assert [row[-1].top[0][0] for row in again] == best


def test_the_cpu_engine_takes_any_token_and_judges_it_as_its_decoder_does(
    cpu_engine: CpuEngine, random_model_dir: Path
) -> None:
    ids = [300 + 7 * at for at in range(40)]
    with KernelPool(1) as pool:
        decoder = load_decoder(random_model_dir, KernelContext(pool))
        num_ids = count_token_ids(random_model_dir, decoder.config.vocab_size)
        logits = decoder.forward(ids)[:, :num_ids].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    driver = EngineDriver(cpu_engine)

    (judged,) = driver.open([ids], num_top=4, first_judged=10)
    driver.release()
    driver.open([ids[:30]], num_top=4, room_tokens=10)
    decoded = [driver.decode([token])[0].logprobs for token in ids[30:]]
    driver.release()

    # sums in another order, through eight random layers
    assert len(judged) == 31
    for at, row in enumerate(judged):
        for token, value in row.top:
            assert value == pytest.approx(logprobs[9 + at, token], abs=2e-3)
    for at, said in enumerate(decoded):
        assert said is not None
        for token, value in said.top:
            assert value == pytest.approx(logprobs[30 + at, token], abs=2e-3)


@pytest.mark.parametrize(
    ("prompts", "room_tokens", "reason"),
    [
        ([PROMPT] * 5, 0, "4 streams"),
        ([PROMPT], 60, "longer than the context of 64"),
        ([PROMPT] * 4, 50, "raise --cache-tokens"),
    ],
)
def test_what_does_not_fit_is_refused(prompts: list[tuple[int, ...]], room_tokens: int, reason: str) -> None:
    num_pages = 40 if "cache" in reason else None
    driver = EngineDriver(FakeEngine(make_limits(num_pages=num_pages)))

    with pytest.raises(ConfigError, match=reason):
        driver.open(prompts, num_top=1, room_tokens=room_tokens)
