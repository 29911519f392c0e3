"""The package's cache of one page, and what takes its place."""

from __future__ import annotations

import ctypes.util
from types import SimpleNamespace

import pytest
import torch

from glm53srv.engine.cuda.cache_pages import find_blocks, hold_pages
from glm53srv.engine.cuda.model import PAGE_TOKENS
from tests.offload_device.gpu.fake_blocks import FakeBlocks

PAGES = 9


class Layer:
    """One as the package has it: some of its tensors are of no size, some are none of its cache."""

    def __init__(self) -> None:
        self.k = torch.zeros((1, PAGE_TOKENS, 1, 16), dtype=torch.half)
        self.v = torch.zeros((1, PAGE_TOKENS, 1, 0), dtype=torch.half)
        self.k_idx: torch.Tensor | None = torch.zeros((1, PAGE_TOKENS, 8), dtype=torch.half)
        self.k_pool: torch.Tensor | None = None
        self.scale = torch.ones(1)
        self.max_num_tokens = PAGE_TOKENS

    def get_tensors(self) -> list[torch.Tensor]:
        found = (self.k, self.v, self.k_idx, self.k_pool)
        return [tensor for tensor in found if tensor is not None]


def test_tensors_of_all_pages_take_the_place_of_those_of_one() -> None:
    layers = {(index, 0): Layer() for index in (3, 7)}
    cache, source = SimpleNamespace(layers=layers, max_num_tokens=PAGE_TOKENS), FakeBlocks()
    pages = hold_pages(cache, source, PAGES, 4)
    assert (pages.num_pages, pages.all_pages) == (4, PAGES)
    for layer in layers.values():
        assert tuple(layer.k.shape) == (PAGES, PAGE_TOKENS, 1, 16)
        assert layer.k_idx is not None
        assert tuple(layer.k_idx.shape) == (PAGES, PAGE_TOKENS, 8)
        assert layer.k.dtype is layer.k_idx.dtype is torch.half
        assert source.is_mapped(layer.k[:4])
        assert not source.is_mapped(layer.k)
        assert layer.v.shape[0] == 1
        assert layer.k_pool is None
        assert tuple(layer.scale.shape) == (1,)
        assert layer.max_num_tokens == PAGES * PAGE_TOKENS
    assert cache.max_num_tokens == PAGES * PAGE_TOKENS
    assert pages.num_bytes == source.num_mapped * source.block_bytes


def test_a_cache_shorter_than_a_chunk_has_all_its_memory() -> None:
    cache = SimpleNamespace(layers={(0, 0): Layer()}, max_num_tokens=PAGE_TOKENS)
    assert hold_pages(cache, FakeBlocks(), 2, 33).num_pages == 2


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="this machine has a driver")
def test_without_a_driver_the_cache_stays_whole_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert find_blocks(torch.device("cuda", 0)) is None
    assert "the KV cache has all its memory from the start: no driver" in caplog.text
