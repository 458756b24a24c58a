"""The thread team: threads that live in machine code, spin briefly for work, then sleep until the next program."""

from __future__ import annotations

import atexit
import ctypes
import threading

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.kernels import control
from llamado.devices.cpu.memory import cache_aligned_zeros
from llamado.devices.cpu.numa import NumaBinding
from llamado.devices.device import DeviceError
from llamado.devices.simd import groups_of

_NONE_LEFT = 1 << 62
"""Value of an operation's counters after `abandon`: beyond the last share, and taking more does not wrap around."""


class Team:
    """`n` threads, of which the caller is the first. One program at a time; `run` returns when it is done.

    Threads never hold the GIL while they work or wait.
    """

    def __init__(self, jit: Jit, n: int, placement: NumaBinding | None = None) -> None:
        self.n = n
        self._placement = placement or NumaBinding(None)
        self._state = cache_aligned_zeros(control.state_words(n))
        self._state[control.TEAM // 8] = n
        self.n_counters = n + groups_of(n)
        """Counters of each operation: one per thread, and one per group of threads."""
        self._fields = np.array([self._state.ctypes.data], np.int64)
        self._address = int(self._fields.ctypes.data)
        self._jit = jit  # keeps the machine code that the threads run
        self._dispatch = jit.function(control.dispatch)
        launch = jit.load(control.launch)
        self._code = launch.code
        # The call takes microseconds and the caller has work to do, so it keeps the GIL.
        self._launch = ctypes.PYFUNCTYPE(None, *[ctypes.c_int64] * 5)(launch.address)
        self._join = jit.function(control.join)
        self._launched = False
        self._work = jit.function(control.work)
        self._lock = threading.Lock()
        self._program = self._counters = np.zeros((1, 1), np.int64)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"llamado-cpu-{i}", daemon=True) for i in range(1, n)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def _serve(self, number: int) -> None:
        self._placement.pin(number)
        self._work(self._address, number, self.n, 0, 0)

    def run(
        self,
        program: NDArray[np.int64],
        counters: NDArray[np.int64],
        n_threads: int,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Run a packed program (rows of kernel, fields, barrier) on the first `n_threads` threads.

        `times` [operations, n_threads, 3]: receives the cycle counter when a thread came to an operation, when it began
        (passed the barrier) and when it was done.
        """
        with self._lock:
            self._set(program, counters, n_threads, times)
            with self._placement.pinned(0):
                self._dispatch(self._address, 0, self.n, 0, 0)

    def launch(self, program: NDArray[np.int64], counters: NDArray[np.int64], n_threads: int) -> None:
        """Start a program on the other threads; `join` runs the caller's part."""
        with self._lock:
            self._set(program, counters, n_threads, None)
            self._launch(self._address, 0, self.n, 0, 0)
            self._launched = True

    def join(self) -> None:
        """Run the caller's part of the launched program, if there is one, and wait until it is done. Callable from any
        thread.
        """
        if self._launched:
            with self._lock:
                self._take_part()

    def _take_part(self) -> None:
        if self._launched:
            with self._placement.pinned(0):
                self._join(self._address, 0, self.n, 0, 0)
            self._launched = False  # last, because readers without the lock take it for done

    def _set(
        self,
        program: NDArray[np.int64],
        counters: NDArray[np.int64],
        n_threads: int,
        times: NDArray[np.int64] | None,
    ) -> None:
        if self._closed:
            raise DeviceError("the CPU device is closed")
        self._take_part()
        state = self._state
        counters.fill(0)
        if program is not self._program or counters is not self._counters:
            self._program, self._counters = program, counters
            state[control.PROGRAM // 8] = program.ctypes.data
            state[control.LENGTH // 8] = len(program)
            state[control.COUNTERS // 8] = counters.ctypes.data
            state[control.COUNTER_STEP // 8] = counters.strides[0]
        state[control.THREADS // 8] = min(n_threads, self.n)
        state[control.TIMES // 8] = 0 if times is None else times.ctypes.data

    def abandon(self) -> None:
        """Leave no work in any operation of the running program: its threads finish only the items they have begun.

        Callable from any thread; does nothing if no program runs.
        """
        self._counters.fill(_NONE_LEFT)

    def close(self) -> None:
        """Stop the threads."""
        atexit.unregister(self.close)
        with self._lock:
            self._take_part()
            self._closed = True
            if self._threads:
                # without a program, the threads leave their loop when they see the next generation
                self._state[control.PROGRAM // 8] = 0
                self._state[control.GENERATION // 8] += 1
                self._wake()
                for thread in self._threads:
                    thread.join()
                self._threads = []

    def _wake(self) -> None:
        if control.FUTEX is not None:
            libc = ctypes.CDLL(None)
            libc.syscall(
                ctypes.c_long(control.FUTEX),
                ctypes.c_void_p(self._state.ctypes.data + control.GENERATION),
                ctypes.c_long(control.WAKE),
                ctypes.c_long(1 << 20),
                None, None, ctypes.c_long(0),
            )  # fmt: skip
