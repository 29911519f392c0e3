"""What a decode step's plans read and the host renews each step: heat and offers, sent in one piece."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from glm53srv.offload.device.gpu.host_reader import HostReader
from glm53srv.offload.geometry import ExpertGeometry
from glm53srv.offload.offers import NUM_WORDS, Offers


class StepWords:
    """Owns them on the device; they never move. Engine thread only.

    heat_rows: int32 (experts,) for each layer. offers: int32 (NUM_WORDS,), head: int32 (1,), see offers.py;
    head is the plans' own, and nothing is on offer before the first send.
    """

    def __init__(self, geometry: ExpertGeometry, device: torch.device) -> None:
        self._words = torch.zeros(geometry.num_keys + NUM_WORDS, dtype=torch.int32, device=device)
        heat = self._words[: geometry.num_keys].view(geometry.num_layers, geometry.num_experts)
        self.heat_rows = list(heat)
        self.offers = self._words[geometry.num_keys :]
        self.head = torch.zeros(1, dtype=torch.int32, device=device)

    def send(self, reader: HostReader, heat: NDArray[np.int32], offers: Offers | None) -> None:
        """Enqueue new ones. heat: int32 (layers, experts)."""
        words = np.zeros(NUM_WORDS, np.int32) if offers is None else offers.words()
        reader.send(np.concatenate([heat.reshape(-1), words]), self._words)
