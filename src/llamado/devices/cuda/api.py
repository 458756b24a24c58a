"""Functions, structures and error numbers of CUDA's driver API (cuda.h), called through ctypes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any

from llamado.devices.device import DeviceError

_OUT = c_void_p
"""A pointer to a value that the function fills."""
_HANDLE = c_void_p
"""An opaque pointer: a context, stream, event, module, function, graph or linker state."""
_ADDRESS = c_uint64
"""CUdeviceptr."""

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDriverGetVersion": (_OUT,),
    "cuGetErrorName": (c_int, _OUT),
    "cuGetErrorString": (c_int, _OUT),
    "cuInit": (c_uint,),
    # cards
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, c_int),
    "cuDeviceGetName": (_OUT, c_int, c_int),
    "cuDeviceGetUuid_v2": (_OUT, c_int),
    "cuDeviceGetPCIBusId": (_OUT, c_int, c_int),
    "cuDeviceTotalMem_v2": (_OUT, c_int),
    "cuDeviceGetAttribute": (_OUT, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (_HANDLE,),
    # memory
    "cuMemGetInfo_v2": (_OUT, _OUT),
    "cuMemAlloc_v2": (_OUT, c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (_OUT, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, c_size_t, _HANDLE),
    "cuMemsetD8Async": (_ADDRESS, c_ubyte, c_size_t, _HANDLE),
    # streams and events
    "cuStreamCreate": (_OUT, c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, c_uint),
    "cuEventCreate": (_OUT, c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventQuery": (_HANDLE,),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventElapsedTime": (_OUT, _HANDLE, _HANDLE),
    # kernels
    "cuModuleLoadDataEx": (_OUT, c_void_p, c_uint, c_void_p, c_void_p),
    "cuModuleUnload": (_HANDLE,),
    "cuModuleGetFunction": (_OUT, _HANDLE, c_char_p),
    "cuFuncSetAttribute": (_HANDLE, c_int, c_int),
    "cuFuncGetAttribute": (_OUT, c_int, _HANDLE),
    "cuLaunchKernelEx": (c_void_p, _HANDLE, c_void_p, c_void_p),
    "cuLinkCreate_v2": (c_uint, c_void_p, c_void_p, _OUT),
    "cuLinkAddData_v2": (_HANDLE, c_int, c_void_p, c_size_t, c_char_p, c_uint, c_void_p, c_void_p),
    "cuLinkComplete": (_HANDLE, _OUT, _OUT),
    "cuLinkDestroy": (_HANDLE,),
    # graphs
    "cuStreamBeginCapture_v2": (_HANDLE, c_int),
    "cuStreamEndCapture": (_HANDLE, _OUT),
    "cuGraphInstantiateWithFlags": (_OUT, _HANDLE, c_ulonglong),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
    "cuGraphExecDestroy": (_HANDLE,),
    "cuGraphDestroy": (_HANDLE,),
}
"""Parameter types of every function used. All of them return a CUresult, an int."""

_QUICK = frozenset({"cuCtxSetCurrent", "cuEventQuery"})
"""Functions that never wait. They keep the GIL, because getting it back from a thread that runs Python code may take
5 ms. All functions that submit work wait if the card's queue is full.
"""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding to eight bytes, and a union of 64 bytes of which an int is used."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_ubyte * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("n_attributes", c_uint),
    )


PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CUlaunchAttributeID: a kernel may start before the previous one has ended, and waits for it itself."""

OUT_OF_MEMORY = 2
NOT_READY = 600
LOSSES = frozenset(
    {
        4,  # DEINITIALIZED: the driver is shutting down
        46,  # DEVICE_UNAVAILABLE
        100,  # NO_DEVICE
        101,  # INVALID_DEVICE
        214,  # ECC_UNCORRECTABLE
        220,  # NVLINK_UNCORRECTABLE
        226,  # CONTAINED: a hardware error, contained to this process
        700,  # ILLEGAL_ADDRESS
        702,  # LAUNCH_TIMEOUT
        709,  # CONTEXT_IS_DESTROYED
        710,  # ASSERT
        714,  # HARDWARE_STACK_ERROR
        715,  # ILLEGAL_INSTRUCTION
        716,  # MISALIGNED_ADDRESS
        717,  # INVALID_ADDRESS_SPACE
        718,  # INVALID_PC
        719,  # LAUNCH_FAILED
        721,  # TENSOR_MEMORY_LEAK
        806,  # MPS_RPC_FAILURE
        810,  # MPS_CLIENT_TERMINATED
        911,  # EXTERNAL_DEVICE
        999,  # UNKNOWN: among others a card that has fallen off the bus
    }
)
"""Errors of an open card after which its context, and all memory in it, is unusable (CUresult in cuda.h)."""

_ADVICE = {
    34: "the library is a stub of the CUDA toolkit: remove its folder from LD_LIBRARY_PATH",
    46: "another process uses the card exclusively: end it, or allow sharing with `nvidia-smi -c DEFAULT`",
    221: "libnvidia-ptxjitcompiler.so.1 is missing: install the complete driver",
    222: "the driver is too old for this code: update it",
    802: "the system is still starting, or nvidia-fabricmanager is not running",
    803: "the driver's library and kernel module are of different versions: restart the machine",
    999: "restart the machine, or reload the kernel module nvidia_uvm, if this happens without any load on the card",
}
"""Remedies by error number."""

_PLACES = (
    "libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",  # containers of Kubernetes
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",  # NixOS
)


class CudaError(DeviceError):
    """A function of the driver API failed. `code` is its CUresult."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class NoDriver(DeviceError):
    """This machine has no usable CUDA driver or card."""


class Api:
    """The driver's functions, with declared parameter types and named errors.

    `library`: an object with the functions of libcuda.so.1; None: load that library.
    """

    MINIMUM = 11080
    """Oldest supported version: CUDA 11.8, the first with cuLaunchKernelEx."""

    def __init__(self, library: Any = None) -> None:
        self._library = _load() if library is None else library
        self._quick = self._library
        if isinstance(self._library, ctypes.CDLL):
            self._quick = ctypes.PyDLL(self._library._name, handle=self._library._handle)
        self._functions: dict[str, Callable[..., int]] = {}
        self._bind("cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString")
        self.version: int = self.out(c_int, "cuDriverGetVersion")
        if self.version < self.MINIMUM:
            raise NoDriver(
                f"the NVIDIA driver supports CUDA {version_text(self.version)}, and {version_text(self.MINIMUM)} is "
                "needed: update the driver to 520 or newer"
            )
        self._bind(*SIGNATURES)

    def _bind(self, *names: str) -> None:
        for name in names:
            try:
                function = getattr(self._quick if name in _QUICK else self._library, name)
            except AttributeError:
                raise NoDriver(f"libcuda.so.1 has no function {name}: reinstall the NVIDIA driver") from None
            function.argtypes, function.restype = SIGNATURES[name], c_int
            self._functions[name] = function

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function and return its CUresult."""
        return self._functions[name](*arguments)

    def check(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises `CudaError`."""
        if code := self.call(name, *arguments):
            raise CudaError(self.describe(name, code), code)

    def out(self, kind: Any, name: str, *arguments: Any) -> Any:
        """Call a function whose first parameter points to a result of a ctypes type. Return the result."""
        value = kind()
        self.check(name, ctypes.byref(value), *arguments)
        return value.value

    def describe(self, name: str, code: int) -> str:
        """Return an error message for a CUresult: the driver's words, and the remedy if there is one."""
        words = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            failed = self.call(function, code, ctypes.byref(text))
            words.append((text.value or b"").decode(errors="replace") if not failed else "")
        message = f"{name}: {words[0] or 'error'} ({code})"
        return "; ".join(filter(None, (f"{message}: {words[1]}" if words[1] else message, _ADVICE.get(code))))


def version_text(version: int) -> str:
    """Return a version number of the API as people write it: 12040 is "12.4"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _load() -> Any:
    chosen = os.environ.get("LLAMADO_LIBCUDA")
    reasons = []
    for place in (chosen,) if chosen else _PLACES:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            reasons.append(str(error))
    if chosen:
        raise NoDriver(f"cannot load the library that LLAMADO_LIBCUDA names: {reasons[0]}")
    raise NoDriver(
        f"this machine has no NVIDIA driver ({reasons[0]}); install it, run containers with --gpus all, or set "
        "LLAMADO_LIBCUDA to the path of libcuda.so.1"
    )
