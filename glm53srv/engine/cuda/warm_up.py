"""Runs what requests will run, so that the first of them is not slower than the second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from glm53srv.engine.base import EngineLimits
from glm53srv.engine.cuda.model import PAGE_TOKENS, CudaModel
from glm53srv.offload.device.gpu.gpu_offload import GpuOffload

logger = logging.getLogger(__name__)

FIRST_STEP_MS = 50.0
"""What the copy budget grants by before a step was timed."""
STEPS_PER_WIDTH = 3
"""exllamav3 runs a shape plainly at first, captures it the second time and replays it from then on."""


def run_every_shape(
    model: CudaModel, offload: GpuOffload, limits: EngineLimits, fill: Callable[[int], None]
) -> None:
    """Run a whole chunk, staged, and decode steps of each width behind it; no sequence may be running.

    fill: gives so many pages of the cache memory.
    """
    room = limits.num_pages // limits.max_streams * PAGE_TOKENS
    tokens = max(1, min(limits.max_chunk_tokens, limits.max_context_tokens - 8, room - 8))
    fill(limits.max_streams * _pages_behind(tokens))
    run_chunk(model, offload, limits, tokens)
    for width in range(1, limits.max_streams + 1):
        run_width(model, offload, width, tokens)


def capture_every_width(
    model: CudaModel, offload: GpuOffload, limits: EngineLimits, *, most_by_row: int
) -> bool:
    """Capture decode steps of each width behind run_every_shape, and run them; tells if it could be done.

    most_by_row: see DecodeGraph. Without graphs a step is right and slower: a package or a card that cannot
    be captured is no reason not to serve.
    """
    begin_s = time.perf_counter()
    try:
        for width in range(1, limits.max_streams + 1):
            model.capture(width, offload, most_by_row=most_by_row)
    except RuntimeError as error:
        model.drop_graphs()
        logger.warning("decode runs without CUDA graphs: %s", str(error).splitlines()[0])
        return False
    for width in range(1, limits.max_streams + 1):
        run_width(model, offload, width, PAGE_TOKENS)
    logger.info("decode graphs widths=%d took_s=%.1f", limits.max_streams, time.perf_counter() - begin_s)
    return True


def _pages_behind(position: int) -> int:
    """Give the pages of a row that decodes some steps from a position on."""
    return -(-(position + STEPS_PER_WIDTH) // PAGE_TOKENS)


def run_chunk(model: CudaModel, offload: GpuOffload, limits: EngineLimits, num_tokens: int) -> None:
    """Prefill a sequence that nobody keeps, to its logits."""
    state = model.new_state()
    try:
        offload.begin_chunk(num_tokens)
        ids = [1 + index * 7 % 251 for index in range(num_tokens)]
        chunk = model.begin_chunk(ids, state, list(range(limits.num_pages)), 0, is_last=True)
        offload.stage_chunk()
        model.run_layers(chunk, 0, limits.num_layers, wants_rows=True)
        model.head(chunk, model.last_hidden(chunk)[:, -1:])
        del chunk  # its activations are the memory that is given back
        offload.end_chunk(is_more_waiting=False)
    finally:
        state.free()


def run_width(model: CudaModel, offload: GpuOffload, width: int, position: int) -> None:
    """Decode behind a long context whose recurrent part is empty: the same kernels, the same time."""
    states = [model.new_state() for _ in range(width)]
    share = _pages_behind(position)
    pages = [list(range(row * share, (row + 1) * share)) for row in range(width)]
    try:
        for state in states:
            state.position = position
        for step in range(STEPS_PER_WIDTH):
            first_job = offload.begin_decode(width, is_captured=model.is_captured(width))
            logits = model.decode([7] * width, states, pages, [position + step] * width, first_job)
            offload.end_decode(FIRST_STEP_MS)
            model.to_host(logits)
    finally:
        for state in states:
            state.free()
