"""Logits on the host: the vocabulary's columns as float32, in rows that the next step uses again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from glm53srv.engine.cuda.host_logits import HostLogits, SentLogits


@dataclass
class Event:
    """Notes that it was waited for."""

    told: list[str] = field(default_factory=list)

    def synchronize(self) -> None:
        self.told.append("waited")


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float])
def test_the_vocabularys_columns_arrive_without_a_change(dtype: torch.dtype) -> None:
    host = HostLogits(11)
    for rows in (2, 1, 4, 3):
        logits = torch.randn(rows, 16).to(dtype)
        found = host.send(logits).wait()
        assert found.dtype == np.float32
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, logits[:, :11].float().numpy())


def test_rows_are_used_again_by_the_next_step() -> None:
    host = HostLogits(5)
    first = host.send(torch.zeros(2, 5)).wait()
    second = host.send(torch.ones(1, 5)).wait()
    assert np.shares_memory(first, second)
    assert first.tolist() == [[1.0] * 5, [0.0] * 5]


def test_logits_are_given_behind_a_wait_for_their_event() -> None:
    event, rows = Event(), np.zeros((1, 3), np.float32)
    assert SentLogits(rows, event).wait() is rows
    assert event.told == ["waited"]
