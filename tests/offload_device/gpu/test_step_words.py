"""Heat and offers on their way to the plans."""

from __future__ import annotations

import numpy as np
import torch

from glm53srv.offload.device.gpu.host_reader import HostReader
from glm53srv.offload.device.gpu.step_words import StepWords
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.offers import NUM_WORDS, RING_SLOTS, Offers


def test_heat_and_offers_arrive_where_the_plans_read_them() -> None:
    geometry = ExpertGeometry(num_layers=3, num_experts=7, top_k=2)
    words = StepWords(geometry, torch.device("cpu"))
    assert not words.offers.any()  # before the first send nothing is on offer
    heat = np.arange(21, dtype=np.int32).reshape(3, 7)
    offers = Offers(11, -(2**31), 5 - 2**31, np.arange(RING_SLOTS, dtype=np.int32))
    words.head.fill_(3)
    words.send(HostReader(), heat, offers)
    assert [row.tolist() for row in words.heat_rows] == heat.tolist()
    assert words.offers.tolist() == [11, -(2**31), 5 - 2**31, *range(RING_SLOTS)]
    words.send(HostReader(), heat, None)
    assert words.offers.tolist() == [0] * NUM_WORDS
    assert int(words.head) == 3  # the plans' own
