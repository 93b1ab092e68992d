"""cuDNN's own choice of a convolution's kernel, asked on a machine without a GPU.

Since version 9.11, cuDNN's heuristics answer for a GPU that is described in JSON
(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR), without a driver. The library comes with every CUDA build of
torch, and with the extra `memlab[cudnn]`. Attributes, types and kinds are numbered as in cuDNN's
header cudnn_graph.h. The Python binding `nvidia-cudnn-frontend` reads the JSON too
(`create_device_properties`), but installs half a gigabyte more and keeps a list of plans of its
own, while torch uses the interface below.
"""

import ctypes
import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from memlab.configs.gpus import Gpu

OLDEST, OLDEST_NAME = 91100, "9.11"
FORWARD, DATA_GRADIENT, WEIGHT_GRADIENT = 10, 12, 11  # kinds of descriptors
TENSOR_CORES, DOWN_CONVERTS, NONDETERMINISTIC = 0, 1, 4  # numerical notes
HEURISTICS, FALLBACK = 0, 2  # modes, in torch's order
OPERATIONS = {
    "forward": FORWARD,
    "data gradient": DATA_GRADIENT,
    "weight gradient": WEIGHT_GRADIENT,
}
DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
# Attributes of an operation: convolution, x, weight, y, alpha, beta.
_OPERATIONS = {
    FORWARD: (702, 704, 703, 705, 700, 701),
    DATA_GRADIENT: (708, 710, 709, 711, 706, 707),
    WEIGHT_GRADIENT: (714, 716, 715, 717, 712, 713),
}
_CONVOLUTION, _ENGINE, _CONFIG, _HEURISTIC, _PLAN = 1, 2, 3, 4, 5
_GRAPH, _TENSOR, _DEVICE = 15, 17, 38
_DTYPE, _INT64, _FLOAT, _DOUBLE, _MODE = 1, 3, 4, 5, 7
_HEURISTIC_MODE, _NOTE, _DESCRIPTOR, _CHARS = 8, 11, 15, 24
_C_TYPES: dict[int, Any] = {
    **dict.fromkeys((_DTYPE, _MODE, _HEURISTIC_MODE, _NOTE), ctypes.c_int),
    **{_INT64: ctypes.c_int64, _FLOAT: ctypes.c_float, _DOUBLE: ctypes.c_double},
    **{_DESCRIPTOR: ctypes.c_void_p, _CHARS: ctypes.c_char},
}


class Operand(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Convolution(NamedTuple):
    """One call of cuDNN. In a transposed convolution, `x` is its output."""

    operation: int
    dtype: str
    x: Operand
    weight: Operand
    y: Operand
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


class CudnnError(Exception):
    """cuDNN returned an error."""


def workspaces(
    gpu: Gpu, convolution: Convolution, mode: int, refused: frozenset[int]
) -> Iterator[int]:
    """Yield the workspaces of the plans of one mode, the best plan first.

    Plans with a numerical note in `refused` are left out, and those that cuDNN cannot build.
    """
    found = library()
    if found is None:
        return
    with ExitStack() as stack:
        make = _Maker(found, stack)
        try:
            device = make(_DEVICE).put(2702, _CHARS, described(gpu).encode()).ready()
            configs = _configs(make, device, _graph(make, convolution), mode)
        except CudnnError:
            return
        for config in configs:
            try:
                if not refused & _notes(make, config):
                    plan = make(_PLAN).put(401, _DESCRIPTOR, [config])
                    yield plan.put(407, _DESCRIPTOR, [device]).ready().get(402, _INT64)
            except CudnnError:  # torch tries the next one, too
                continue


def _graph(make: "_Maker", of: Convolution) -> "_Descriptor":
    dtype = DTYPES[of.dtype]
    computes = DTYPES["float64" if of.dtype == "float64" else "float32"]
    tensors = [
        make(_TENSOR)
        .put(901, _DTYPE, [dtype])
        .put(902, _INT64, operand.shape)
        .put(903, _INT64, operand.strides)
        .put(906, _INT64, [ord(name)])
        # torch passes 32 where the address allows it, as a block's does; cuDNN answers as for 16.
        .put(900, _INT64, [32])
        .ready()
        for name, operand in zip("xwy", of[2:5], strict=True)
    ]
    convolution = make(_CONVOLUTION).put(100, _DTYPE, [computes]).put(101, _MODE, [1])
    for attribute, values in {
        **{102: of.dilation, 103: of.stride, 104: of.padding, 105: of.padding},
        106: [len(of.stride)],
    }.items():
        convolution.put(attribute, _INT64, values)
    scale = _DOUBLE if of.dtype == "float64" else _FLOAT
    operation = make(of.operation)
    parts = [convolution.ready(), *tensors]
    *attributes, alpha, beta = _OPERATIONS[of.operation]
    for attribute, part in zip(attributes, parts, strict=True):
        operation.put(attribute, _DESCRIPTOR, [part])
    operation.put(alpha, scale, [1.0]).put(beta, scale, [0.0])
    return make(_GRAPH).put(801, _DESCRIPTOR, [operation.ready()]).ready()


def _configs(
    make: "_Maker", device: "_Descriptor", graph: "_Descriptor", mode: int
) -> "list[_Descriptor]":
    heuristic = make(_HEURISTIC).put(201, _DESCRIPTOR, [graph]).put(200, _HEURISTIC_MODE, [mode])
    heuristic.put(204, _DESCRIPTOR, [device]).ready()
    configs = [make(_CONFIG) for _ in range(heuristic.count(202))]
    return configs[: heuristic.fill(202, configs)]


def _notes(make: "_Maker", config: "_Descriptor") -> set[int]:
    engine = make(_ENGINE)
    config.fill(300, [engine])
    return engine.get_all(1303, _NOTE)


# ------------------------------------------------------------------ descriptors


class _Descriptor:
    """A cuDNN object. Errors raise CudnnError."""

    def __init__(self, library: Any, kind: int) -> None:
        self._library, self.pointer = library, ctypes.c_void_p()
        self._call("CreateDescriptor", kind, ctypes.byref(self.pointer))

    def put(self, attribute: int, kind: int, values: Any) -> "_Descriptor":
        raw = [v.pointer.value for v in values] if kind == _DESCRIPTOR else values
        array = (_C_TYPES[kind] * len(raw))(*raw)
        count = ctypes.c_int64(len(raw))
        self._call("SetAttribute", self.pointer, attribute, kind, count, array)
        return self

    def ready(self) -> "_Descriptor":
        self._call("Finalize", self.pointer)
        return self

    def get(self, attribute: int, kind: int) -> Any:
        (value,) = self._get(attribute, kind, (_C_TYPES[kind] * 1)())
        return value

    def get_all(self, attribute: int, kind: int) -> set[int]:
        array = (_C_TYPES[kind] * 32)()
        return set(self._get(attribute, kind, array))

    def count(self, attribute: int) -> int:
        found = ctypes.c_int64()
        count = ctypes.byref(found)
        self._call(
            "GetAttribute", self.pointer, attribute, _DESCRIPTOR, ctypes.c_int64(0), count, None
        )
        return found.value

    def fill(self, attribute: int, others: "list[_Descriptor]") -> int:
        """Let cuDNN fill other descriptors; return how many it filled."""
        array = (ctypes.c_void_p * len(others))(*(other.pointer.value for other in others))
        return len(self._get(attribute, _DESCRIPTOR, array))

    def _get(self, attribute: int, kind: int, array: Any) -> list[Any]:
        found = ctypes.c_int64()
        size, count = ctypes.c_int64(len(array)), ctypes.byref(found)
        self._call("GetAttribute", self.pointer, attribute, kind, size, count, array)
        return list(array[: found.value])

    def destroy(self) -> None:
        self._library.cudnnBackendDestroyDescriptor(self.pointer)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, f"cudnnBackend{name}")(*arguments):
            raise CudnnError(f"cudnnBackend{name} returned {status}")


class _Maker:
    """Makes descriptors, and destroys them when the stack closes."""

    def __init__(self, library: Any, stack: ExitStack) -> None:
        self._library, self._stack = library, stack

    def __call__(self, kind: int) -> _Descriptor:
        made = _Descriptor(self._library, kind)
        self._stack.callback(made.destroy)
        return made


# ------------------------------------------------------------------ the GPU, and the library

# The most shared memory of a block and the most blocks of a multiprocessor, by architecture (CUDA
# Programming Guide, technical specifications; CUDA keeps 1 KiB of a block on Ampere and newer). For
# older GPUs, cuDNN's builds for CUDA 13 answer with kernels that no recorded workspace confirms.
_LIMITS = {
    **{"sm_75": (65536, 16), "sm_80": (166912, 32), "sm_86": (101376, 16), "sm_87": (166912, 16)},
    **{"sm_89": (101376, 24), "sm_90": (232448, 32), "sm_100": (232448, 32)},
    **{"sm_103": (232448, 32), "sm_120": (101376, 24)},
}


def answers_for(gpu: Gpu) -> bool:
    """Return whether cuDNN is installed and can describe this GPU."""
    return gpu.arch in _LIMITS and library() is not None


def described(gpu: Gpu) -> str:
    """Return the JSON that describes a GPU to cuDNN, which wants all of these keys."""
    shared_bytes, blocks = _LIMITS[gpu.arch]
    major, minor = gpu.capability
    figures = {
        "deviceName": gpu.full_name,
        "deviceVer": major * 100 + minor * 10,
        "multiProcessorCount": gpu.multiprocessors,
        "totalGlobalMem": gpu.total_bytes,
        "maxThreadsPerSM": gpu.threads_per_multiprocessor,
        "maxSharedMemoryPerBlockOptin": shared_bytes,
        "maxCtasPerSM": blocks,
        "reservedSharedMemoryPerBlock": 1024 if major >= 8 else 0,
    }
    return json.dumps({**_ALIKE, **figures})


# Each value was varied for five GPUs in 168 to 249 convolutions (9.24): on a T4, twice the
# multiprocessors change 25 answers; on an H100, half a clock rate changes one. Nothing else changed
# any: neither driver, ids, names and memory, nor shared memory, registers, threads and caches.
_ALIKE = {
    **{"maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64]},
    **{"regsPerBlock": 65536, "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 49152},
    **{"maxThreadsPerBlock": 1024, "warpSize": 32, "smCountOrigin": 0, "isTccDriver": 0},
    **{"supportCoopLaunch": 1, "cudaDeviceId": 0, "pciDeviceId": 0, "driverVer": 13000},
    **{"smClockRateKHz": 1_700_000, "memClockRateKHz": 2_619_000, "l2CacheSize": 40 * 2**20},
}


@cache
def library() -> Any:
    """Return the loaded library; None if there is none, or one that is too old."""
    for path in _paths():
        try:
            found = ctypes.CDLL(path)
        except OSError:
            continue
        if found.cudnnGetVersion() >= OLDEST:
            return found
    return None


def _paths() -> Iterator[str]:
    wheels = find_spec("nvidia")  # of torch's CUDA builds, or of memlab[cudnn]
    for folder in (wheels and wheels.submodule_search_locations) or ():
        yield str(Path(folder) / "cudnn" / "lib" / "libcudnn.so.9")
    yield "libcudnn.so.9"


def version() -> str | None:
    """Return the version of the library that answers, such as "9.24.1"; None without one."""
    if library() is None:
        return None
    return f"{number() // 10000}.{number() // 100 % 100}.{number() % 100}"


def number() -> int:
    """Return the version as cuDNN counts, such as 92401."""
    return int(library().cudnnGetVersion())
