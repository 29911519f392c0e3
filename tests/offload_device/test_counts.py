"""What a step's log adds to the counts."""

from __future__ import annotations

import numpy as np

from glm53srv.offload.device.counts import Counts
from glm53srv.offload.split import Lane


def test_a_log_adds_its_picks_and_its_distinct_experts() -> None:
    counts = Counts(num_vram=100, num_picks=7)
    picks = np.array([[3, 3, 5, -1], [1, 2, 4, 8]], np.int32)
    lanes = np.array(
        [[Lane.VRAM, Lane.VRAM, Lane.SPLIT, 0], [Lane.CPU, Lane.VRAM, Lane.CPU, Lane.CPU]], np.int8
    )
    kept = np.array([[-1, -1, 70, -1], [-1, -1, -1, -1]], np.int32)
    counts.add_log(
        picks,
        kept,
        lanes,
        np.array([[1, 1, 0, 9, 9, 9, 5], [1, 0, 3, 9, 9, 9, 0]], np.int32),
        np.array([[0, 0], [2, 1]]),
    )
    frozen = counts.frozen()
    assert (frozen.num_vram, frozen.num_link, frozen.num_cpu) == (102, 1, 3)
    assert frozen.num_kept == 1
    assert frozen.num_split == 1
    assert (frozen.num_guessed, frozen.num_guessed_right) == (2, 1)
    assert (frozen.num_picks, frozen.num_hit_picks) == (14, 3)


def test_prompts_are_told_as_far_as_they_came() -> None:
    counts = Counts()
    counts.set_prompts(5, 0.25, 0.5, 0.125)
    counts.set_prompts(7, 0.5, 0.75, 0.25)
    frozen = counts.frozen()
    assert frozen.num_prompt_cpu == 7
    assert (frozen.prompt_cpu_ms, frozen.prompt_device_ms, frozen.prompt_wait_ms) == (500.0, 750.0, 250.0)
