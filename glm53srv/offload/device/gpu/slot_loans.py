"""What is borrowed of the cache on a GPU: by a prefill chunk slots for staging and memory for activations, by
the KV cache memory for its pages.

slots   0 ..            capacity ..              ..                     .. num_slots
        serve           staging (have memory)    activations (none)     pages (none)
        serve           pages (none), while no chunk borrows

Which slots are without memory may change, how many may not: pages that fill beside a chunk take theirs from
below its staging buffers, and the order above is made again when the chunk ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from glm53srv.errors import EngineError
from glm53srv.offload.device.counts import Counts
from glm53srv.offload.device.gpu.gpu_slots import GpuSlots
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.device.staged_chunk import StagedChunk
from glm53srv.offload.elastic import ElasticLoan, LoanParams, Phase, loan_slots
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.residency_update import ResidencyUpdate
from glm53srv.offload.staging import should_stage
from glm53srv.offload.vram_plan import VramPlan

logger = logging.getLogger(__name__)

MAX_SETTLING_ADVANCES = 6
"""Advances after which called slots must be lent when no step runs: unmap, drained, landed, spare."""


class SlotLoans:
    """Owns the loans and the chunk that is staged, None while none is. Engine thread only.

    Per chunk: begin, stage, the layers of `staged`, end. It may end at any layer; decode steps may run
    between two. page_slots: lent to pages, in whole chunks of slots; read-only.
    """

    def __init__(
        self,
        policy: ResidencyPolicy,
        store: GpuSlots,
        plan: VramPlan,
        params: LoanParams,
        options: OffloadOptions,
        counts: Counts,
        *,
        learn_last: Callable[[], None],
        apply: Callable[[ResidencyUpdate], None],
    ) -> None:
        """learn_last: reads the newest step's log. apply: enqueues what an update changes on the device."""
        self.staged: StagedChunk | None = None
        self._policy = policy
        self._store = store
        self._plan = plan
        self._params = params
        self._min_picks = options.min_picks(policy.geometry.num_experts)
        self._counts = counts
        self._learn_last, self._apply = learn_last, apply
        self._device = store.device_table.device
        self._loan = ElasticLoan(plan)
        self.page_slots = 0
        self._is_staging = False

    @property
    def has_chunk(self) -> bool:
        """Tell whether a chunk borrows, or did and another one follows."""
        return self._loan.phase is not Phase.FULL

    def begin(self, num_tokens: int) -> bool:
        """Borrow for a chunk of so many tokens. Tells whether its layers will be staged.

        Raises torch.OutOfMemoryError, EngineError."""
        policy, plan = self._policy, self._plan
        geometry = policy.geometry
        is_staged = plan.stage_slots > 0 and should_stage(num_tokens, geometry.top_k, self._min_picks)
        loan = loan_slots(plan, geometry.expert_bytes, num_tokens, is_staged, self._params)
        shrink = self._loan.begin(loan).shrink
        if shrink:
            self._counts.num_loans += 1
            self._call(shrink)
            self._loan.poll(policy.is_lent)
        staged = 2 * plan.stage_slots if is_staged else 0
        lent = policy.num_slots - self.page_slots - policy.capacity
        self._is_staging = is_staged and lent >= staged
        if shrink or self._is_staging:
            self._place(staged)
        return self._is_staging

    def stage(self) -> None:
        """Begin to stage the chunk's first layers, if they are to be."""
        if self._is_staging:
            self.staged = StagedChunk(self._policy, self._store, self._plan)

    def end(self, is_more_waiting: bool) -> None:
        """End the chunk, finished or not, and give the loan back unless another chunk follows at once.

        Where the memory is not there, since something else took it, the slots stay lent until a later
        chunk's end.
        """
        chunk, self.staged = self.staged, None
        self._is_staging = False
        if chunk is not None:
            chunk.abort()
            self._counts.num_staged += chunk.num_staged
        # The memory first: a loan that cannot be given back yet stays a loan, and is asked for again.
        if is_more_waiting or not self._loan.num_lent or self._take_back():
            self._policy.grow(self._loan.end(is_more_waiting).grow)

    def can_lend(self, num_slots: int) -> bool:
        """Tell whether a chunk still gets all that it may borrow, and a chunk of slots stays beside it."""
        left = self._policy.num_slots - self.page_slots - num_slots
        return left >= self._plan.elastic_slots + self._plan.chunk_slots

    def lend_to_pages(self, num_slots: int) -> None:
        """Free the memory of so many more slots, whole chunks: between two steps, also beside a chunk.

        Raises ValueError when fewer are left, EngineError.
        """
        self._call(num_slots)
        self.page_slots += num_slots
        capacity = self._policy.capacity
        self._store.lend(range(capacity, capacity + num_slots))
        torch.cuda.empty_cache()

    def take_from_pages(self, num_slots: int) -> bool:
        """Take so many slots back, whose memory the pages have given up; while no chunk borrows.

        Tells whether the card had room for them.
        """
        if self.has_chunk or not 0 <= num_slots <= self.page_slots:
            raise ValueError(f"{num_slots} slots of the pages' {self.page_slots}, has_chunk={self.has_chunk}")
        capacity = self._policy.capacity
        if not self._allocate(range(capacity, capacity + num_slots)):
            return False
        self._policy.grow(num_slots)
        self.page_slots -= num_slots
        return True

    def _place(self, num_staged: int) -> None:
        """Let the first lent slots have memory, those for staging, and the others none."""
        capacity, num_slots = self._policy.capacity, self._policy.num_slots
        staging = range(capacity, capacity + num_staged)
        self._store.lend(range(staging.stop, num_slots))
        if not self._store.has_memory(staging):  # of a kept loan, of which pages have taken since
            torch.cuda.empty_cache()
            self._store.take_back(staging)

    def _take_back(self) -> bool:
        """Allocate the slots that the chunk borrowed; tells whether the card had room for them."""
        torch.cuda.synchronize(self._device)
        end = self._policy.num_slots - self.page_slots
        self._store.lend(range(end, self._policy.num_slots))  # staging may have reached there
        torch.cuda.empty_cache()  # the chunk's activations: they are the slots' memory
        return self._allocate(range(self._policy.capacity, end))

    def _allocate(self, slots: range) -> bool:
        try:
            self._store.take_back(slots)
            return True
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        logger.warning("%d slots stay lent, the card has no room: %s", len(slots), reason)
        return False

    def _call(self, num_slots: int) -> None:
        """Take slots from the end of those that serve, and wait until nothing uses them."""
        self._learn_last()  # since no step follows whose end would read the last one's log
        self._policy.shrink(num_slots)
        torch.cuda.synchronize(self._device)
        for _ in range(MAX_SETTLING_ADVANCES):
            if self._policy.is_lent:
                return
            self._store.drain()
            self._apply(self._policy.advance(self._store.take_landed(), 0))
        raise EngineError("slots called for were not lent: residency is stuck")
