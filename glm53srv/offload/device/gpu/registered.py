"""Host memory that the GPU reads and writes: registered with the driver, mapped into its address space."""

from __future__ import annotations

import logging
from typing import Any

import torch

from glm53srv.errors import MachineError
from glm53srv.offload.device.pinning import memlock_text
from glm53srv.offload.device.region import GIB, Region

logger = logging.getLogger(__name__)

PORTABLE, MAPPED = 1, 2
"""cudaHostRegister's flags."""


class RegisteredMemory:
    """Pinning by cudaHostRegister (pinning.Pinning). One region; extension: exllamav3's compiled part."""

    name = "registered"

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self._address: int | None = None

    def pin(self, region: Region) -> None:
        """Register it. Raises MachineError when the driver refuses: the lock limit, or too little memory."""
        try:
            self._extension.cuda_host_register(region.address, region.num_bytes, PORTABLE | MAPPED)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise MachineError(
                f"the driver cannot pin {region.num_bytes / GIB:.2f} GiB of host memory ({reason}); the lock "
                f"limit is {memlock_text()}: raise it with `ulimit -l unlimited`, LimitMEMLOCK=infinity in a "
                "systemd unit, or --ulimit memlock=-1 of a container"
            ) from error
        self._address = region.address

    def release(self) -> None:
        """Unregister it. Idempotent."""
        address, self._address = self._address, None
        if address is not None:
            self._extension.cuda_host_unregister(address)


def host_tensor(region: Region) -> torch.Tensor:
    """View a region as a tensor, uint8 (num_bytes,), for copies; the tensor keeps the memory mapped."""
    return torch.from_numpy(region.array())


def device_alias(extension: Any, region: Region, device: torch.device) -> torch.Tensor:
    """View a registered region as memory of the device, uint8 (num_bytes,): reads go over the link."""
    alias: torch.Tensor = extension.pinned_cuda_view(host_tensor(region), device.index or 0)
    return alias
