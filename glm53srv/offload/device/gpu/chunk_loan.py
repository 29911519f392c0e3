"""What a prefill chunk borrows of the cache on a GPU: slots for staging, and memory for its activations."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from glm53srv.errors import EngineError
from glm53srv.offload.device.counts import Counts
from glm53srv.offload.device.gpu.gpu_slots import GpuSlots
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.device.staged_chunk import StagedChunk
from glm53srv.offload.elastic import ElasticLoan, LoanParams, loan_slots
from glm53srv.offload.residency import ResidencyPolicy
from glm53srv.offload.residency_update import ResidencyUpdate
from glm53srv.offload.staging import should_stage
from glm53srv.offload.vram_plan import VramPlan

logger = logging.getLogger(__name__)

MAX_SETTLING_ADVANCES = 6
"""Advances after which called slots must be lent when no step runs: unmap, drained, landed, spare."""


class ChunkLoan:
    """Owns the loan and the chunk that is staged, None while none is. Engine thread only.

    Per chunk: begin, stage, the layers of `staged`, end. It may end at any layer; decode steps may run
    between two.
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
        self._lent = range(0)  # slots without memory
        self._is_staging = False

    def begin(self, num_tokens: int) -> bool:
        """Borrow for a chunk of so many tokens. Tells whether its layers will be staged."""
        policy, plan = self._policy, self._plan
        geometry = policy.geometry
        is_staged = plan.stage_slots > 0 and should_stage(num_tokens, geometry.top_k, self._min_picks)
        loan = loan_slots(plan, geometry.expert_bytes, num_tokens, is_staged, self._params)
        shrink = self._loan.begin(loan).shrink
        if shrink:  # with the last step's log read, since no step follows whose end would read it
            self._learn_last()
        policy.shrink(shrink)
        if shrink:
            self._counts.num_loans += 1
            self._settle()
        staged = 2 * plan.stage_slots if is_staged else 0
        self._is_staging = is_staged and policy.num_slots - policy.capacity >= staged
        if shrink:
            self._lent = range(policy.capacity + staged, policy.num_slots)
            self._store.lend(self._lent)
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

    def _take_back(self) -> bool:
        """Allocate lent slots again; tells whether the card had room for them."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the chunk's activations: they are the slots' memory
        try:
            self._store.take_back(range(self._policy.capacity, self._policy.num_slots))
            return True
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        self._store.lend(self._lent)  # also those that came back: the next chunk counts on them
        logger.warning("%d slots stay lent, the card has no room: %s", len(self._lent), reason)
        return False

    def _settle(self) -> None:
        """Wait until called slots are lent: no step runs once the device is idle."""
        torch.cuda.synchronize(self._device)
        for _ in range(MAX_SETTLING_ADVANCES):
            if self._loan.poll(self._policy.is_lent):
                return
            self._store.drain()
            self._apply(self._policy.advance(self._store.take_landed(), 0))
        raise EngineError("slots called for a prefill were not lent: residency is stuck")
