"""Frames as torch records them by default, with stacks="all": C++ and Python frames are mixed.

They have the form of public snapshots: silmont2000/assignment2-systems mem_snapshot.pickle
(attention written out, Python 3.12), cranberrii/ftcourse memory_snapshot.pickle (QLoRA in a
notebook, Python 3.10) and Constructor-Sun/code_location memory_snapshot.pickle (a graph network).
"""

from collections.abc import Iterable, Iterator, Sequence

ALLOCATOR = (
    ("??", 0, "torch::unwind::unwind()"),
    ("??", 0, "torch::CapturedTraceback::gather(bool, bool, bool)"),
    ("memory_snapshot.cpp", 0, "torch::cuda::(anonymous namespace)::gather_with_cpp()"),
    (
        "CUDACachingAllocator.cpp",
        0,
        "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(signed char)",
    ),
    ("", 0, "at::TensorBase at::detail::_empty_generic<long>(c10::ArrayRef<long>)"),
    ("RegisterCUDA.cpp", 0, "at::(anonymous namespace)::create_out(c10::ArrayRef<long>)"),
)
INTERPRETER = (
    ("/usr/local/src/conda/python-3.10.14/Objects/call.c", 215, "_PyObject_MakeTpCall"),
    ("/usr/local/src/conda/python-3.10.14/Python/ceval.c", 5945, "do_call_core"),
    ("??", 0, "_PyEval_EvalFrameDefault"),
)
START = (("??", 0, "Py_BytesMain"), ("", 0, "__libc_start_main_alias_2"), ("??", 0, "_start"))
ENGINE = (
    ("??", 0, "torch::autograd::Engine::evaluate_function(std::shared_ptr<GraphTask>&)"),
    ("??", 0, "torch::autograd::Engine::thread_main(std::shared_ptr<GraphTask> const&)"),
    ("/work/gcc/libstdc++-v3/src/c++11/thread48.o", 0, "execute_native_thread_routine"),
    ("??", 0, "start_thread"),
    ("", 0, "__clone3"),
)


def operators(*names: str) -> tuple:
    """The C++ frames of operators, innermost first."""
    return tuple(
        frame
        for name in names
        for frame in (
            ("??", 0, f"at::_ops::{name}::redispatch(c10::DispatchKeySet, at::Tensor const&)"),
            ("VariableType_3.cpp", 0, f"torch::autograd::VariableType::{name}(at::Tensor const&)"),
            ("??", 0, f"at::_ops::{name}::call(at::Tensor const&)"),
        )
    )


def forward(*python: tuple, ops: Sequence[str]) -> list[dict]:
    """The frames of an allocation by Python code, given innermost first."""
    return as_dicts(*ALLOCATOR, *operators(*ops), *interpreted(python), *START)


def backward(node: str, op: str, *python: tuple) -> list[dict]:
    """The frames of an allocation in backward, with the Python code of a node that has some."""
    name = f"torch::autograd::generated::{node}::apply(std::vector<at::Tensor>&&)"
    made = (*ALLOCATOR, *operators(op), *interpreted(python))
    return as_dicts(*made, ("??", 0, name), *ENGINE)


def interpreted(python: Iterable[tuple]) -> Iterator[tuple]:
    return (frame for each in python for frame in (each, *INTERPRETER))


def as_dicts(*frames: tuple) -> list[dict]:
    return [dict(zip(("filename", "line", "name"), frame, strict=True)) for frame in frames]
