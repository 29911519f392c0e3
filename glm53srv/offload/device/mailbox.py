"""The mailbox as Python sees it: memory, places, and the numbers in it.

The protocol and every byte are described in native/include/glm53_kernels.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm53srv.native_library import open_library
from glm53srv.offload.device.region import Region

HEADER_BYTES = 256
POSTED, DONE, STATUS, NUM_EXPERTS, ELAPSED_NS, NUM_BLOCKS = 0, 64, 68, 72, 76, 80
LAYER, ROWS, NUM_PICKS, X_KIND, PART_EXPERT, PART_BLOCKS, PICKS = 128, 132, 136, 140, 144, 148, 256
"""Bytes from the start of a cell; the header's GLM53_MAIL_* (a test compares them)."""

X_F32, X_F16 = 0, 1


@dataclass(frozen=True, slots=True)
class MailboxShape:
    """num_cells: jobs under way at most, a power of two. max_rows: 1..8. max_picks: per row.

    first_seq: number of the first job.
    """

    max_rows: int
    max_picks: int
    hidden: int
    num_cells: int = 64
    first_seq: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What the crew says about a job besides its sums. elapsed_ms: of the computation.

    num_blocks: 128-blocks of its experts' intermediates, fewer than all where one was computed in part.
    """

    num_experts: int
    num_blocks: int
    elapsed_ms: float


class Mailbox:
    """Memory for jobs. One producer and one crew use it; see the protocol for who may touch what when."""

    def __init__(self, shape: MailboxShape) -> None:
        """Map and initialise it. Raises ValueError for an impossible shape, MachineError without memory."""
        library = open_library()
        ffi, lib = library.ffi, library.lib
        fields = (shape.num_cells, shape.max_rows, shape.max_picks, shape.hidden, shape.first_seq)
        native_shape = ffi.new("glm53_mailbox_shape *", fields)
        layout = ffi.new("glm53_mailbox_layout *")
        if lib.glm53_mailbox_measure(native_shape, layout) != lib.GLM53_OK:
            raise ValueError(f"impossible mailbox: {shape}")
        self.shape = shape
        self.region = Region(layout.total_bytes)
        assert lib.glm53_mailbox_init(self.region.pointer, native_shape) == lib.GLM53_OK
        self.cell_bytes = int(layout.cell_bytes)
        self.weights_offset = int(layout.weights_offset)
        self.x_offset = int(layout.x_offset)
        self.y_offset = int(layout.y_offset)

    def cell(self, seq: int) -> NDArray[np.uint8]:
        """View the cell of job seq: uint8 (cell_bytes,)."""
        begin = HEADER_BYTES + seq % self.shape.num_cells * self.cell_bytes
        return self.region.array()[begin : begin + self.cell_bytes]

    def partial(self, seq: int, num_rows: int) -> NDArray[np.float32]:
        """View the sums of an answered job: float32 (num_rows, hidden), until its cell is used again."""
        end = self.y_offset + 4 * num_rows * self.shape.hidden
        return self.cell(seq)[self.y_offset : end].view(np.float32).reshape(num_rows, self.shape.hidden)

    def answer(self, seq: int) -> Answer:
        """Read what an answered job cost."""
        words = self.cell(seq)[NUM_EXPERTS : NUM_BLOCKS + 4].view(np.uint32)
        return Answer(int(words[0]), int(words[2]), float(words[1]) / 1e6)
