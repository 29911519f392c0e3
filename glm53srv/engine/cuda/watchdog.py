"""Ends a process whose device does not answer: a blocked wait for a GPU can be ended in no other way.

The engine thread says when it begins to wait and when the wait is over; a thread of its own looks at the
clock. A CPU worker that hangs is another matter, which the crew's own watchdog turns into an error.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from glm53srv.errors import EngineError

logger = logging.getLogger(__name__)

STEP_LIMIT_S = 300.0
"""Longest step that is not taken for a hang: a chunk of 8,192 tokens takes 3 s on an H200, and some ten on
the slowest cards meant, of which a step runs a part."""
LOOK_S = 1.0


def end_process() -> None:
    """End the process at once: threads that wait for the device cannot be joined."""
    logging.shutdown()
    os._exit(EngineError.exit_code)


class DeviceWatchdog:
    """Watches one thread's waits. begin and end belong to that thread; close to any.

    clock: seconds. on_hang: called once, on the watching thread, when a wait has lasted limit_s.
    starts_thread: False leaves `look` to the caller, for tests.
    """

    def __init__(
        self,
        limit_s: float = STEP_LIMIT_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_hang: Callable[[], None] = end_process,
        starts_thread: bool = True,
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._on_hang = on_hang
        self._began_s: float | None = None
        self._what = ""
        self._has_barked = False
        self._is_closed = threading.Event()
        if starts_thread:
            threading.Thread(target=self._watch, name="device-watchdog", daemon=True).start()

    def begin(self, what: str) -> None:
        """Begin to wait for the device. what: named in the log if it never ends."""
        self._what = what
        self._began_s = self._clock()

    def end(self) -> None:
        """The wait is over."""
        self._began_s = None

    def look(self) -> None:
        """Look at the clock once."""
        began_s = self._began_s
        if began_s is None or self._has_barked or self._clock() - began_s < self._limit_s:
            return
        self._has_barked = True
        logger.critical(
            "the GPU did not finish %s within %.0f s: it hangs or was lost (see dmesg for Xid); the server "
            "ends, so that a supervisor starts it again",
            self._what,
            self._limit_s,
        )
        self._on_hang()

    def close(self) -> None:
        """End the watching. Idempotent."""
        self._is_closed.set()

    def _watch(self) -> None:
        while not self._is_closed.wait(LOOK_S):
            self.look()
