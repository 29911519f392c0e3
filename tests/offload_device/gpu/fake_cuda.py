"""Torch's streams and events, and the driver, where there is no GPU: all is done at once, in call order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.offload_device.copy_engine import STREAM


class FakeDriver:
    """The package's extension, as far as memory is registered through it: that is done by saying so."""

    def cuda_host_register(self, address: int, num_bytes: int, flags: int) -> None:
        """Do nothing."""

    def cuda_host_unregister(self, address: int) -> None:
        """Do nothing."""


class FakeEvent:
    """Has always passed."""

    def __init__(self, **options: bool) -> None:
        self.options = options

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing."""


class FakeStream:
    """Waits for nothing, since all is done."""

    cuda_stream = STREAM

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        assert event is not None

    def wait_stream(self, stream: Any) -> None:
        assert stream is not None

    def record_event(self) -> FakeEvent:
        return FakeEvent()


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace what the offload takes of torch.cuda."""
    main = FakeStream()

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        assert isinstance(stream, FakeStream)
        yield

    patch.setattr(torch.cuda, "Stream", FakeStream)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "stream", on)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    patch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
