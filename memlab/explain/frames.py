"""Stack frames of allocations: which part of a training step they belong to.

A frame is (filename, line, name), innermost first in a stack. With stacks="all", torch's default,
the first Python frame stands behind 20 to 40 C++ frames, and the interpreter's C functions stand
between the Python frames. A stack keeps every Python frame, and of C++:

    aten::mm                       an operator, the outermost one as Python called it
    autograd::MmBackward0          the node of autograd that runs in backward
    autograd::Engine               backward itself
    at::cuda::getNewWorkspace      a function that asks for scratch memory

With stacks="python" backward has no frames, because autograd's thread runs no Python code.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

from memlab.explain.source_files import SourceLine, class_of, is_without_gradients


class Frame(NamedTuple):
    """One line of a stack."""

    filename: str
    line: int
    name: str

    def __str__(self) -> str:
        if is_cpp(self):
            return self.name
        short = "/".join(self.filename.replace("\\", "/").split("/")[-2:])
        return f"{short}:{self.line} {self.name}"


Stack = tuple[Frame, ...]

MEMLAB = "memlab"  # the filename of frames that memlab's own exporter writes
_LIBRARY = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python3[.\d]*)/"
    r"|(^|/)torch/(nn|optim|autograd|utils|functional|amp|cuda|distributed|_\w+)[/.]"
    r"|(^|/)(transformers|accelerate|lightning|pytorch_lightning|peft|trl|deepspeed|timm)/\w"
    r"|^<frozen|^<__array_function__|^<eval_with_key>|(^|/)torchinductor_[^/]+/"
)
_WRAPPER = re.compile(  # libraries around a model, and Python's own
    r"/(torch|accelerate|peft|bitsandbytes|einops|triton|torchinductor_[^/]+)/|/lib/python3[.\d]*/(?!\w+-packages/)"
)
# A dispatch mode on the CPU adds these; they are not the step's own code.
_DISPATCH = re.compile(  # Python code between an operator and the code that called it
    r"(^|/)torch/(_ops|_compile|utils/_python_dispatch|overrides|_dynamo/eval_frame)\.py$"
)
_CPP_FILE = re.compile(r"\.(cpp|cc|c|h|hpp|cu|cuh|o|so(\.\d+)*)$|^\?\?$|^:?\d*$")
_OPERATOR = re.compile(r"\bat::_ops::(\w+)::call\b")
_NODE = re.compile(r"\btorch::autograd::(?:generated::)?(?:(\w+)(?:<.*>)?::apply\b|(Engine)::)")
_SCRATCH = re.compile(r"[\w:]*([Ww]orkspace|cudnn\w*[Pp]lan|getCUDABlas)\w*")
_OPTIMIZER_FILE = re.compile(
    r"(^|/)(torch|torchao|bitsandbytes|apex|memlab|deepspeed)/(\w+/)*optim(izers?)?/"
    r"|(^|/)transformers/optimization\.py|(^|/)deepspeed/ops/adam"
)
_CHECKPOINT_FILE = re.compile(  # a user's utils/checkpoint.py saves weights
    r"(^|/)(torch/utils/checkpoint\.py|activation_checkpointing/|memlab/checkpointing/"
    r"|algorithms/_checkpoint/)"
)
_SCHEDULER_FILE = re.compile(r"lr_scheduler|swa_utils")
_LOSS = re.compile(r"cross_entropy|log_softmax|nll_loss|CrossEntropy|LogSoftmax|ForCausalLMLoss")
_LOSS_FILE = re.compile(r"nn/modules/loss\.py|transformers/loss/|(^|/)\w*loss\w*\.py$")
_ATTENTION = re.compile(r"attention|attn|(^|[_.:])softmax|masked_fill", re.IGNORECASE)
_SOFTMAX = re.compile(r"(^|[.:_])softmax(_int)?$")
_CAT = re.compile(r"(^|[_.:])cat(_out)?(_cuda)?($|[_.:(])|cache_utils")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_EVALUATION = {
    *("eval", "evaluate", "evaluation", "evaluator", "validate", "validation", "valid", "val"),
    *("infer", "inference", "test"),
}
_EVALUATION_ALONE = {"predict", "prediction"}  # predict_noise() of a training evaluates nothing
_STEPS = {"step", "epoch", "loop", "batch", "all", "one", "run", "on", "self"}
_TRAINING = {"train", "training", "trains", "fit", "learn", "optimize", "update", "finetune"}
_GENERATION = {"generate", "generation", "autoregressive"}
_DECODING = {"decode", "decoding", "sample", "sampling"}  # a VAE decodes, a policy samples
_MODULE_FILE = re.compile(
    r"torch/nn/modules/module\.py$|(^|/)modeling_utils\.py$|(^|/)(accelerate|diffusers|peft)/"
)
_CONVERSIONS = {"to", "cuda", "half", "bfloat16", "float", "_apply", "convert"}
_LOADING = re.compile(
    r"^(from_pretrained|create_weights|load_(model|weights|checkpoint)|\w{0,60}state_dict\w{0,60})$"
)
_NO_GRAD_FRAMEWORK = re.compile(  # their evaluation loops disable gradients
    r"(^|/)transformers/trainer\w*\.py$|(^|/)(lightning|pytorch_lightning|lightning_fabric)/"
    r"|(^|/)(ignite|fastai|mmengine|ultralytics|composer|keras)/"
)
_COLLECTING = {
    *("nested_concat", "torch_pad_and_concatenate", "nested_gather", "gather", "all_gather"),
    *("gather_for_metrics", "pad_across_processes", "_gpu_gather", "dim_zero_cat"),
}


def stack_of(frames: Iterable[Mapping[str, Any]] | None) -> Stack:
    """Return the frames of a snapshot as a stack. Equal frames become one object.

    Some tools write the outermost frame first; it is the module's.
    """
    kept: list[Frame] = []
    for f in frames or ():
        frame = _frame(str(f.get("filename", "")), f.get("line", 0), str(f.get("name", "")))
        is_repeated = bool(kept) and frame == kept[-1] and not frame.filename
        if frame and not is_repeated:
            kept.append(frame)
    if kept and kept[0].name == "<module>" != kept[-1].name:
        kept.reverse()
    return tuple(kept)


@cache
def _frame(filename: str, line: int, name: str) -> Frame | None:
    """Return the frame, its name short if it is C++; None if it says nothing about the code."""
    frame = Frame(filename, line, name)
    if not is_cpp(frame):
        return None if _DISPATCH.search(filename) else frame
    if found := _OPERATOR.search(name):
        return Frame("", 0, f"aten::{found[1]}")
    if found := _NODE.search(name):
        return Frame("", 0, f"autograd::{found[1] or found[2]}")
    found = _SCRATCH.search(name)
    return Frame("", 0, found[0]) if found else None


@cache
def is_cpp(frame: Frame) -> bool:
    """Whether the frame is C++ code."""
    return "::" in frame.name or bool(_CPP_FILE.search(frame.filename))


@cache
def is_user(frame: Frame) -> bool:
    """Whether the frame is the user's own Python code."""
    path = frame.filename.replace("\\", "/")
    return path != MEMLAB and not is_cpp(frame) and not _LIBRARY.search(path)


@cache
def user_frames(stack: Stack) -> Stack:
    """Return the user's frames, outermost first."""
    return tuple(frame for frame in reversed(stack) if is_user(frame))


@cache
def in_optimizer(stack: Stack) -> bool:
    """Whether an optimizer's `step` made the allocation."""
    return any(
        _OPTIMIZER_FILE.search(path) and not _SCHEDULER_FILE.search(path)
        for path in (frame.filename.replace("\\", "/") for frame in stack)
    )


@cache
def makes_state(stack: Stack) -> bool:
    """Whether the optimizer was creating its state. SGD makes its momentum in the update itself."""
    names = {frame.name.rpartition(".")[2] for frame in stack}
    if names & {"_init_group", "init_state", "init_states", "_init_state", "state_init"}:
        return True
    return in_optimizer(stack) and any("sgd" in name for name in names)


@cache
def in_backward(stack: Stack) -> bool:
    """Whether the frames name autograd's engine, or start in code that only autograd calls."""
    if not stack:
        return False
    if stack[-1].filename.endswith(("torch/utils/checkpoint.py", "torch/autograd/function.py")):
        return True
    for inner, outer in zip(stack, (*stack[1:], None), strict=True):
        if inner.name.startswith("autograd::") or inner.name == "_engine_run_backward":
            return True
        called_by_autograd = outer is None or outer.filename.endswith("autograd/function.py")
        called_by_autograd |= inner.filename.endswith(("torch/_tensor.py", "autograd/__init__.py"))
        if inner.name.endswith("backward") and called_by_autograd:
            return True
    return False


@cache
def in_recompute(stack: Stack) -> bool:
    """Whether activation checkpointing ran this code, in forward or in backward."""
    return any(_CHECKPOINT_FILE.search(f.filename.replace("\\", "/")) for f in stack)


@cache
def in_forward(stack: Stack) -> bool:
    """Whether a module, a functional operator or a function called forward was running."""
    for frame in stack:
        path, name = frame.filename.replace("\\", "/"), frame.name.rpartition(".")[2]
        if name == "forward" or path.endswith(("torch/nn/functional.py", "torch/functional.py")):
            return name not in ("__init__", "reset_parameters") and not _is_building(stack)
    return in_loss(stack)


def _is_building(stack: Stack) -> bool:
    names = {frame.name.rpartition(".")[2] for frame in stack}
    return bool(names & {"__init__", "reset_parameters"}) and "forward" not in names


@cache
def in_loss(stack: Stack) -> bool:
    """Whether a loss over classes was running."""
    return any(_LOSS.search(f.name) or _LOSS_FILE.search(f.filename) for f in stack)


@cache
def in_attention(stack: Stack) -> bool:
    """Whether functions or files, not folders, mention attention or its softmax. A loss has a
    softmax too."""
    if in_loss(stack):
        return False
    names = (name for f in stack for name in (f.name, re.split(r"[/\\]", f.filename)[-1]))
    return any(map(_ATTENTION.search, names))


@cache
def in_softmax(stack: Stack) -> bool:
    """Whether a softmax was running, of torch or of the user's own."""
    return any(_SOFTMAX.search(f.name) for f in stack)


@cache
def in_cat(stack: Stack) -> bool:
    """Whether tensors were concatenated, or a library's cache of keys and values grew."""
    return any(_CAT.search(f.name) or "cache_utils" in f.filename for f in stack)


@cache
def in_workspace(stack: Stack) -> bool:
    """Whether a library asked for scratch memory."""
    return any(_SCRATCH.search(f.name) for f in stack if is_cpp(f))


@cache
def in_setup(stack: Stack) -> bool:
    """Whether a model was built, moved, loaded or saved."""
    return any(map(_sets_up, stack))


def _sets_up(frame: Frame) -> bool:
    name = frame.name.rpartition(".")[2]
    if name in _CONVERSIONS:  # a batch has a method to() as well
        return bool(_MODULE_FILE.search(frame.filename.replace("\\", "/")))
    return name in ("__init__", "reset_parameters") or bool(_LOADING.search(name))


@cache
def evaluation_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame of a function that evaluates, by its name."""
    return next((f for f in stack if _evaluates(f)), None)


def _evaluates(frame: Frame) -> bool:
    words = _words(frame)
    alone = bool(words & _EVALUATION_ALONE) and not words - _EVALUATION_ALONE - _STEPS
    return (bool(words & _EVALUATION) or alone) and not words & _TRAINING


@cache
def generation_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame of a function that generates text, by its name."""
    return next((f for f in stack if _words(f) & _GENERATION), None)


@cache
def decoding_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame of a function that may generate text: other things decode too."""
    return next((f for f in stack if _words(f) & _DECODING), None)


@cache
def framework_without_grad(stack: Stack) -> Frame | None:
    """Return a frame of a framework's evaluation loop, which disables gradients itself."""
    for frame in stack:
        path = frame.filename.replace("\\", "/")
        of_file = frame._replace(name=path.rpartition("/")[2].removesuffix(".py"))
        named = _evaluates(frame) or _evaluates(of_file)
        if named and _NO_GRAD_FRAMEWORK.search(path):
            return frame
    return None


@cache
def collecting_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame that joins the outputs of several batches or processes."""
    return next((f for f in stack if f.name.rpartition(".")[2] in _COLLECTING), None)


def in_worker(stack: Sequence[Frame]) -> bool:
    """Whether a worker process of a DataLoader was running."""
    return any(f.filename.replace("\\", "/").endswith("data/_utils/worker.py") for f in stack)


def runs(stack: Stack, function: Frame) -> bool:
    """Whether the function of a frame is on the stack, at any line."""
    return any(f.name == function.name and f.filename == function.filename for f in stack)


def _words(frame: Frame) -> set[str]:
    """Return the words of a function's name; none for tests, C++ and memlab's own frames."""
    if is_cpp(frame) or frame.filename == MEMLAB or frame.name.startswith("test_"):
        return set()
    last = frame.name.rpartition(".")[2]
    return {word.lower() for word in _WORDS.findall(last)}


def disables_grad(stack: Stack) -> bool:
    """Whether a decorator such as `torch.no_grad()` or a framework's evaluation is around the
    code."""
    decorated = any(f.filename.endswith("utils/_contextlib.py") for f in stack)
    return decorated or framework_without_grad(stack) is not None


def in_block_without_grad(stack: Stack) -> bool:
    """Whether a `with` block that disables gradients is around the code, as far as the user's
    files are here."""
    return any(is_without_gradients(SourceLine(*frame)) for frame in user_frames(stack))


def user_line(stack: Stack) -> Frame | None:
    """Return the user's innermost frame, or else the innermost Python frame."""
    found = user_frames(stack)
    if found:
        return found[-1]
    return next((f for f in stack if not is_cpp(f) and f.filename != MEMLAB), None)


def model_line(stack: Stack) -> Frame | None:
    """Return the line of a library's model that the user's line runs, such as modeling_llama.py's.

    Libraries that wrap a model (torch's modules, accelerate's hooks, peft) are left out.
    """
    under_user = takewhile(lambda frame: not is_user(frame), stack)
    paths = ((frame, frame.filename.replace("\\", "/")) for frame in under_user)
    return next(
        (f for f, path in paths if f.line and _LIBRARY.search(path) and not _WRAPPER.search(path)),
        None,
    )


def with_class(frame: Frame) -> Frame:
    """Return the frame with its module's class in the name, as far as its file is here."""
    owner = class_of(SourceLine(*frame))
    return frame._replace(name=f"{owner}.{frame.name}") if owner else frame


def operator(stack: Stack) -> str:
    """Return the operator that Python called, or the node of autograd that called it, or ""."""
    names = [frame.name for frame in takewhile(is_cpp, stack) if frame.name != "autograd::Engine"]
    return names[-1].removeprefix("autograd::") if names else ""
