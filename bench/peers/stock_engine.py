"""Stock exllamav3 with its CPU worker, as an engine that takes the same plans as ours.

The calls are those of the package's Generator (generator/job.py for prompts, generator/generator.py for
decode): a prompt in chunks, the last to its logits, and one forward for all decode rows; the token is chosen
on the device and read back, once a step. Nothing of the package is changed.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.peers.heat import Heat, module_key, placement, save_heat
from glm53srv.engine.base import (
    DecodeRow,
    EngineLimits,
    PrefillSlice,
    SampledToken,
    StepPlan,
    StepResult,
    StepStats,
)
from glm53srv.errors import EngineError, MachineError
from glm53srv.model.config import ModelConfig
from glm53srv.offload.device.layout import sparse_layers

PAGE_TOKENS = 256
"""The package's page of the cache."""
TABLE_STEP = 16
"""Pages to a multiple of which the Generator pads block tables of decode."""
PACKAGE_VERSION = "1.5.1"


@dataclass(frozen=True, slots=True)
class StockSetup:
    """cpu_experts: of each sparse layer, on the CPU. heat: by which the others are chosen, see heat.py."""

    model_dir: Path
    config: ModelConfig
    cpu_experts: int
    heat: Heat
    threads: int
    cache_tokens: int
    max_streams: int
    chunk_tokens: int


class StockLayer:
    """A sparse layer of the package. mlp: its BlockSparseMLP."""

    def __init__(self, mlp: Any) -> None:
        self.mlp = mlp

    def change_routing(self, wrap: Any) -> None:
        """Replace the router by wrap(router), an attribute of the instance that every step calls once."""
        self.mlp.routing_fn = wrap(self.mlp.routing_fn)


class StockEngine:
    """Owns the loaded package model, its cache and a state for each slot. Engine thread only."""

    def __init__(self, model: Any, cache: Any, limits: EngineLimits, layers: list[StockLayer]) -> None:
        """Take a loaded model with its cache. layers: its sparse ones."""
        self.layers = layers
        self._model = model
        self._cache = cache
        self._limits = limits
        self._states: dict[int, Any] = {}

    @classmethod
    def load(cls, package: Any, setup: StockSetup) -> StockEngine:
        """Load a checkpoint with its experts split, by import_package's package.

        Starts the package's worker process, which imports the main module anew. Raises MachineError if the
        package did not split as it was told.
        """
        config = package.Config.from_directory(str(setup.model_dir))
        config.infer_params.moe_cpu_split = setup.cpu_experts
        config.infer_params.moe_cpu_threads = setup.threads
        model = package.Model.from_config(config)
        num_pages = -(-setup.cache_tokens // PAGE_TOKENS)
        cache = package.Cache(
            model,
            max_num_tokens=num_pages * PAGE_TOKENS,
            layer_type=package.CacheLayer_fp16,
            max_batch_size=setup.max_streams + 1,
        )
        with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
            path = Path(directory) / "heat.json"
            save_heat(path, setup.heat)
            # Read by the package when it loads a sparse layer: static placement, by these numbers.
            os.environ["EXL3_MOE_CPU_SWAP"] = "0"
            os.environ["EXL3_MOE_CPU_SPLIT_STATS"] = str(path)
            model.load(device="cuda:0", progressbar=False)
        layers = [StockLayer(model.find_module(module_key(i))) for i in sparse_layers(setup.config)]
        check_split(layers, setup)
        limits = EngineLimits(
            max_streams=setup.max_streams,
            max_context_tokens=num_pages * PAGE_TOKENS,
            max_chunk_tokens=setup.chunk_tokens,
            page_tokens=PAGE_TOKENS,
            num_pages=num_pages,
            num_layers=setup.config.num_layers,
            vocab_size=setup.config.vocab_size,
            eos_token_ids=setup.config.eos_token_ids,
        )
        return cls(model, cache, limits, layers)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def offload_report(self) -> None:
        return None

    def warm_up(self) -> None:
        """Compile and tune: a whole chunk, a short prompt, and three steps of each width."""
        limits = self._limits
        share = limits.num_pages // limits.max_streams
        length = min(limits.max_chunk_tokens, share * PAGE_TOKENS)
        ids = [1 + index * 7 % 251 for index in range(length)]
        with torch.inference_mode():
            self._prompt(0, tuple(ids), 0, tuple(range(share)), is_last=True)
            self._free(0)
            for width in range(1, limits.max_streams + 1):
                rows = [tuple(range(slot * share, (slot + 1) * share)) for slot in range(width)]
                for slot, pages in enumerate(rows):
                    self._prompt(slot, tuple(ids[:96]), 0, pages, is_last=True)
                for step in range(3):
                    plan = [DecodeRow(slot, 7 + step, 96 + step, pages) for slot, pages in enumerate(rows)]
                    self._decode(plan)
                for slot in range(width):
                    self._free(slot)

    def step(self, plan: StepPlan) -> StepResult:
        """Run a step. Raises EngineError for a slice that stops between two layers: the package cannot."""
        tokens: list[SampledToken] = []
        is_done = False
        with torch.inference_mode():
            for slot in plan.release:
                self._free(slot)
            first = None
            if plan.prefill is not None:
                first, is_done = self._slice(plan.prefill), True
            if plan.decode:
                drawn = self._decode(plan.decode)
                tokens += [SampledToken(row.slot, id_) for row, id_ in zip(plan.decode, drawn, strict=True)]
            if plan.prefill is not None and first is not None:
                tokens.append(SampledToken(plan.prefill.slot, first))
        return StepResult(plan.step_id, tuple(tokens), is_done, StepStats())

    def close(self) -> None:
        """Free the model, which ends the worker. Idempotent."""
        self._states.clear()
        if self._model is not None:
            self._model.unload()
            self._model = None

    def _slice(self, piece: PrefillSlice) -> int | None:
        if (piece.layer_begin, piece.layer_end) != (0, self._limits.num_layers):
            raise EngineError("stock exllamav3 runs a chunk through all layers")
        return self._prompt(
            piece.slot, piece.token_ids, piece.start_position, piece.page_ids, is_last=piece.is_last_chunk
        )

    def _prompt(
        self, slot: int, token_ids: tuple[int, ...], start: int, pages: tuple[int, ...], *, is_last: bool
    ) -> int | None:
        """Run a chunk, whole; for the last one, wait for the device and give the token behind it."""
        if start == 0:
            self._free(slot)
            self._states[slot] = self._cache.get_new_state()
        num_pages = -(-(start + len(token_ids)) // PAGE_TOKENS)
        params = self._params([slot], [pages], [start], num_pages)
        ids = torch.tensor([token_ids], dtype=torch.int64)
        if not is_last:
            self._model.prefill(ids, params)
            return None
        return self._choose(self._model.forward(ids, params | {"last_tokens_only": 1}))[0]

    def _decode(self, rows: Sequence[DecodeRow]) -> list[int]:
        longest = max(row.position for row in rows) + 1
        width = -(-longest // (TABLE_STEP * PAGE_TOKENS)) * TABLE_STEP
        params = self._params(
            [row.slot for row in rows], [row.page_ids for row in rows], [row.position for row in rows], width
        )
        ids = torch.tensor([[row.token_id] for row in rows], dtype=torch.int64)
        return self._choose(self._model.forward(ids, params))

    def _choose(self, logits: torch.Tensor) -> list[int]:
        """Give the most likely token of each row, from (rows, 1, padded vocabulary). Waits for the device."""
        chosen: list[int] = logits[:, -1, : self._limits.vocab_size].argmax(dim=-1).tolist()
        return chosen

    def _params(
        self, slots: list[int], pages: list[tuple[int, ...]], positions: list[int], width: int
    ) -> dict[str, Any]:
        """Make the arguments of a forward; fresh each time, as the package keeps device copies in them."""
        table = torch.zeros((len(slots), width), dtype=torch.int32)
        for row, own in enumerate(pages):
            used = own[:width]
            table[row, : len(used)] = torch.tensor(used, dtype=torch.int32)
        return {
            "attn_mode": "flash_attn",
            "cache": self._cache,
            "block_table": table,
            "cache_seqlens": torch.tensor(positions, dtype=torch.int32),
            "recurrent_states": [self._states[slot] for slot in slots],
            "recurrent_history": False,
            "indexed_embeddings": [],
        }

    def _free(self, slot: int) -> None:
        state = self._states.pop(slot, None)
        if state is not None:
            state.free()


def import_package() -> Any:
    """Import exllamav3, with its own numerics. Changes torch's allocator, so come before limits are set.

    Raises MachineError for another version, and where it cannot be imported.
    """
    try:
        package: Any = importlib.import_module("exllamav3")
        version = importlib.import_module("exllamav3.version").__version__
    except (ImportError, OSError, RuntimeError) as error:
        raise MachineError(f"cannot import exllamav3: {str(error).splitlines()[0]}") from error
    if version != PACKAGE_VERSION:
        raise MachineError(f"exllamav3 {version} is installed, this peer is {PACKAGE_VERSION}")
    return package


def check_split(layers: Sequence[StockLayer], setup: StockSetup) -> None:
    """Raise MachineError unless every sparse layer is split and placed as it should be: the package loads a
    layer whole, or in the order of numbers, with no more than a line of text, where it cannot."""
    wanted = setup.config.moe.num_experts - setup.cpu_experts
    for number, layer in zip(sparse_layers(setup.config), layers, strict=True):
        found = layer.mlp.cpu_split_first
        if found != wanted:
            raise MachineError(
                f"exllamav3 keeps {'all' if found is None else found} experts of layer {number} on the card, "
                f"{wanted} were asked for: see what it printed"
            )
        if layer.mlp._split_perm != placement(setup.heat[module_key(number)]):
            raise MachineError(f"exllamav3 did not place the experts of layer {number} by heat: see above")
