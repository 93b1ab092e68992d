"""The table of what `memlab explain` reads from a log: one row for each way a cause shows.

The first row that applies names the cause, and the next ones the alternatives. A row asks for

    kinds    what the log ends with: names of messages.ERRORS, separated by spaces
    error    words of the message
    frames   a file and function of the traceback, such as "torch/serialization.py load"
    failing  file, function and code around the failing operator: the user's last line and below
    near     the same, of the last six frames
    before   lines printed above the traceback
    log      any line
    when     facts of text_causes.TextSituation, all true
    unless   facts, none true

Evidence quotes the log; a line whose `{words}` the log does not have is left out. `example` is the id
of a report in tests/explain/corpus.jsonl that the row was written for. How often a row was right on
those reports is counted by tests/explain/confidence.py, and is its confidence.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from memlab.explain.advice import for_log
from memlab.explain.findings import CAUSES, Finding
from memlab.explain.text_causes import WSL, TextSituation, row_of

Fact = Callable[[TextSituation], Any] | property | cached_property[Any]
_S = TextSituation
SIZED, GPU = "sized", "sized bare"
COUNTS = Path(__file__).with_name("counts.json")  # of tests/explain/confidence.py
MOST_CAUSES = 3
MOST_SURE = 0.89  # of a rule that only says what is left: medium


@dataclass(frozen=True)
class Rule:
    """A row of the table."""

    cause: str
    example: str
    evidence: tuple[str, ...] = ()
    kinds: str = GPU
    error: str = ""
    frames: str = ""
    failing: str = ""
    near: str = ""
    before: str = ""
    log: str = ""
    when: tuple[Fact, ...] = ()
    unless: tuple[Fact, ...] = ()
    decide: str = ""  # the one check that tells this cause from the next ones
    is_fallback: bool = False  # says what is left, so it is never sure
    _patterns: dict[str, re.Pattern[str]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for part in ("error", "frames", "failing", "near", "before", "log"):
            if pattern := getattr(self, part):
                self._patterns[part] = re.compile(pattern)

    def match(self, situation: TextSituation) -> str | None:
        """Return the words that the row matched, or None if it does not apply."""
        if situation.log.kind not in self.kinds.split():
            return None
        if not all(value_of(fact, situation) for fact in self.when):
            return None
        if any(value_of(fact, situation) for fact in self.unless):
            return None
        words = ""
        for part, pattern in self._patterns.items():
            found = pattern.search(_text(part, situation))
            if found is None:
                return None
            words = _quoted(part, pattern, situation) or found[0].strip()
        return words


def value_of(fact: Fact, situation: TextSituation) -> Any:
    """Return what a property or function says of a situation."""
    return fact(situation) if callable(fact) else fact.__get__(situation, TextSituation)


def _text(part: str, situation: TextSituation) -> str:
    of_log = {"error": "error", "before": "before", "log": "text"}
    if part in of_log:
        return str(getattr(situation.log, of_log[part]))
    return str(getattr(situation, part))


def _quoted(part: str, pattern: re.Pattern[str], situation: TextSituation) -> str:
    """Return the innermost line of the traceback that matches."""
    if part in ("frames", "failing", "near"):
        for line in reversed(situation.log.lines):
            row = row_of(line) if part != "frames" else row_of(line).partition(": ")[0]
            if pattern.search(row):
                return str(line)
    return ""


_ENOUGH = "{free} are free on the card, and the request of {requested} was refused"
_COMMITTED = "Task Manager, Performance, Memory: is 'committed' near its limit?"
_BATCH_OF_ONE = "Run one step with batch 1: if it fits, it is the batch; if not, weights and state."
_AT = "memory ran out at {place}"
_WEIGHTS = "{model} has {weights} of weights in 16 bits, and the card {whole}"
_LOGITS = (
    r"(?i)(?<!binary_)cross_?entropy|log_softmax|logsumexp|lm_head|(?<!with_)logits|logprobs|log_probs|\bvocab|unembed"
    r"|loss_utils|ForCausalLMLoss"
)
_TRAINING_CODE = re.compile(
    r"\.backward\(|cross_entropy|\bloss[=:]|softmax\(|optimizer\.step|training_step"
    r"|[/\\]\w{0,20}train\w{0,20}\.py"
)
_LANGUAGE = r"transformers/|trl/|modeling_|llama|gpt|qwen|bert|/t5|liger|lm\b|llm|dpo|grpo|sft"

RULES: tuple[Rule, ...] = (
    # ------------------------------------------------ other software, and sizes that decide
    Rule("vllm-room", "vllm-27508", ("vLLM says: {said}",), "vllm"),
    Rule(
        "other-process",
        "vllm-20305",
        ("vLLM says: {said}",),
        "vllm-shared",
    ),
    Rule(
        "colocated-engine",
        "lmmr1-43",
        ("vLLM's sleeping memory could not be mapped again: {said}",),
        "cumem",
    ),
    Rule(
        "colocated-engine",
        "verl-3366",
        (
            "{allocated} count as allocated on a card of {capacity}, with pools of a sleeping engine",
        ),
        when=(_S.engine_sleeps,),
    ),
    Rule(
        "jax",
        "jax-17217",
        ("the card was full before JAX took its share, or JAX took it all: {no_room}",),
        "jax",
        when=(_S.jax_found_no_room,),
    ),
    Rule("jax", "jaxprivacy-10", ("the message is JAX's: {said}",), "jax"),
    Rule(
        "tensorflow",
        "finetune-339",
        ("the message is TensorFlow's: {said}",),
        "tensorflow",
    ),
    Rule("paddle", "paddleocr-645", ("the message is Paddle's: {said}",), "paddle paddle-path"),
    Rule(
        "llama-cpp",
        "ikllama-749",
        ("llama.cpp asks for {requested} for {llama_buffer}", "its pipeline keeps {copies} copies"),
        "llama",
    ),
    Rule("mlx", "mlx-236", ("the message is Metal's, from MLX: {said}",), "mlx"),
    Rule(
        "request",
        "warpctc-151",
        ("the request is a negative number: a size was computed wrong", _AT),
        SIZED,
        when=(_S.wrapped_size,),
    ),
    Rule(
        "driver",
        "therock-4598",
        ("the driver states {free} free of {whole} in total, which contradicts itself", _AT),
        when=(_S.more_free_than_card,),
    ),
    Rule(
        "request",
        "mdeq-9",
        (
            "the request of {requested} is {times} times the card's {whole}; it would not fit on an "
            "empty card",
            "the line that asks for it: {asking}",
            "{requested} are requested at once",
        ),
        SIZED,
        when=(_S.larger_than_card,),
    ),
    Rule(
        "host-ram",
        "ds-3860",
        ("the computer's own memory ran out, not the GPU's: {requested} requested", _AT),
        SIZED,
        when=(_S.on_host,),
    ),
    # ------------------------------------------------ not the GPU's memory, or no memory problem
    Rule(
        "pinned-memory",
        "pointcept-101",
        ("memory ran out where a batch is pinned: {match}",),
        GPU,
        frames=r"pin_memory\.py|_pin_memory_loop|pin_memory$",
    ),
    Rule("shm", "pipedream-28", ("the log says: {said}",), "shm"),
    Rule(
        "page-file",
        "weclip-5",
        ("Windows says: {said}",),
        "page-file",
    ),
    Rule(
        "host-ram",
        "vin-7",
        ("the node used {node}, most of it {user}", "the log ends with: {said}", _AT),
        "host",
    ),
    Rule(
        "host-ram",
        "qwenvl-135",
        ("the kernel killed a process that held {killed} of RAM", "the log says: {said}"),
        "killed",
        error=r"Out of memory: Killed process \d{1,9}",
    ),
    Rule(
        "host-ram",
        "dj-39",
        ("the system killed the process: {said}",),
        "killed",
        decide="`dmesg | grep -i oom` names the process if memory was the reason; if not, a limit of "
        "the scheduler or somebody's kill was.",
        is_fallback=True,  # the signal alone does not say why
    ),
    Rule(
        "outside-allocator",
        "hcvae-7",
        ("a library of CUDA could not start: {said}",),
        "handle",
        decide="Run `torch.randn(8, 8, device='cuda') @ torch.randn(8, 8, device='cuda')` alone: if "
        "that fails too, the installation is broken, else the card was full.",
    ),
    Rule("not-oom", "trades-32", ("the log says: {said}",), "fault"),
    Rule("not-oom", "mathformula-19", ("the log ends with: {said}",), "other"),
    # ------------------------------------------------ limits, the driver, other processes
    Rule(
        "nvml",
        "fal-478",
        (
            "the assert is in the function that writes PyTorch's out-of-memory message: it asked NVML "
            "for the other processes, and NVML failed",
            _AT,
        ),
        "bare",
        error=r"(?i)nvml.{0,160}CUDACachingAllocator",
    ),
    Rule(
        "allocation-limit",
        "xputriton-7477",
        (
            "{requested} were refused although this process holds only {allocated} of {whole}",
            "Intel's drivers limit one allocation, most often to 4 GiB",
        ),
        when=(_S.on_xpu, lambda s: (s.message.requested or 0) > 0.9 * 2**30, _S.little_held),
    ),
    Rule(
        "allocation-limit",
        "ipex-629b",
        ("the driver says: {match}",),
        error=r"can NOT allocate memory block with size larger than \w{1,9}",
    ),
    Rule(
        "limit",
        "pytorch-111729",
        ("this process is allowed {allowed} of the card's {capacity}", _ENOUGH),
        when=(_S.below_a_limit,),
    ),
    Rule(
        "limit",
        "pytorch-111363",
        (_ENOUGH, "what this process reserved is a round share of the card"),
        when=(_S.much_free, _S.at_a_fraction),
        unless=(_S.windows, _S.on_hip),
        decide="Search the code for set_per_process_memory_fraction.",
    ),
    Rule(
        "wsl",
        "chatglm-28",
        (_ENOUGH, "the log is of WSL2: {match}"),
        log=WSL,
        when=(_S.much_free,),
        decide=_COMMITTED,
    ),
    Rule(
        "page-file",
        "yolov5-1698",
        (_ENOUGH, "on Windows every allocation also needs room in the paging file"),
        when=(_S.much_free, _S.names_windows),
        unless=(_S.on_hip,),
        decide=_COMMITTED,
    ),
    Rule(
        "page-file",
        "framepack-233",
        (_ENOUGH, "the message states the card's full size, as it does on Windows"),
        when=(_S.much_free, _S.windows),
        unless=(_S.on_hip,),
        decide="On Windows: Task Manager, Performance, Memory: is 'committed' near its limit? On "
        "Linux: the driver or a limit; allocate the same size in a new process.",
        is_fallback=True,  # a card of another size may be meant
    ),
    Rule(
        "driver",
        "pytorch-175431",
        (_ENOUGH, "so memory of the card is not what is short"),
        when=(_S.much_free,),
        decide="Allocate the same size in a new process: if that works, it is a limit of this process "
        "(a memory fraction, the number of mappings); if not, the driver's.",
    ),
    Rule(
        "ranks-on-one-gpu",
        "trl-3172",
        ("{processes}", "they are as many as a job's ranks, and on one card"),
        when=(_S.others_alike,),
    ),
    Rule(
        "colocated-engine",
        "swift-5943",
        (
            "{elsewhere} of {whole} ({share}) are neither free nor PyTorch's",
            "an inference engine runs in this job: {match}",
        ),
        log=r"(?i)vllm|grpo|rlhf|sglang|rollout_?worker|colocate",
        when=(_S.others_some,),
        unless=(_S.others_large, lambda s: s.message.processes),
    ),
    Rule(
        "colocated-engine",
        "rlinf-255",
        ("{elsewhere} of {whole} ({share}) are neither free nor PyTorch's", "the job: {match}"),
        frames=r"(?i)vllm|grpo|rlhf|sglang|rollout|ppo",
        when=(_S.others_some, _S.states_own),
    ),
    Rule(
        "other-process",
        "cyclegan-962",
        ("{elsewhere} of {whole} ({share}) are used outside this process", "{processes}"),
        when=(_S.others_large, _S.states_own),
    ),
    # ------------------------------------------------ saving, loading, building
    Rule(
        "fsdp-state-dict",
        "bagel-157",
        ("the weights of all ranks are gathered: {match}",),
        frames=r"fsdp/_state_dict_utils|_full_(pre|post)_state_dict|_zero3_consolidated|summon_full_pa"
        r"|fsdp/\S{0,60} \w{0,40}state_dict|accelerator\.py get_state_dict",
    ),
    Rule(
        "fsdp-state-dict",
        "swift-4023",
        ("ZeRO-3 gathers weights outside a step: {match}",),
        frames=r"partition_parameters\.py (_?all_?gather\w{0,40}|_allgather\w{0,40}|__enter__)",
        unless=(lambda s: re.search(r"parameter_offload|param_coordinator", s.frames),),
        decide="Look for GatheredParameters in the frames above.",
    ),
    Rule(
        "fsdp-state-dict",
        "rrhf-30",
        ("FSDP could not copy a gathered weight: {match}",),
        error=r"Failed to clone\(\) tensor with name \S{1,80}",
    ),
    Rule(
        "lora-merge",
        "unsloth-1667",
        ("adapters are merged on the GPU: {match}",),
        frames=r"merge_and_unload|_merge_lora|save_pretrained_merged|merge_adapter|_unload_and_opt",
    ),
    Rule(
        "checkpoint-on-gpu",
        "graphstorm-344",
        ("torch.load puts a checkpoint on the GPU: {match}",),
        frames=r"torch/serialization\.py \w{0,40}|torch/storage\.py (_load|__reduce)",
    ),
    Rule(
        "checkpoint-on-gpu",
        "mmf-185",
        ("the optimizer's state is copied while a checkpoint is loaded: {match}",),
        frames=r"torch/optim/\S{0,40} load_state_dict|_load_optimizer_and_scheduler",
    ),
    Rule(
        "vllm-room",
        "trl-3128",
        ("vLLM measures what it needs, or makes its KV cache: {match}",),
        frames=r"vllm/\S{0,80} (profile_run|determine_\w{0,20}available_\w{1,9}|_?dummy_run"
        r"|initialize_(kv_)?cache|_?allocate_kv_cache\w{0,9}|_initialize_kv_caches|execute_model)"
        r"|sglang/\S{0,80}",
        unless=(_S.others_large,),
    ),
    Rule(
        "cuda-graphs",
        "wvllm-40",
        ("CUDA graphs were captured: {match}",),
        log=r"Capturing (the model for )?(CUDA|cuda) ?graphs?|cuda_graph_runner|capture_model"
        r"|torch\.cuda\.graph\(",
    ),
    Rule(
        "optimizer-state",
        "gritlm-65",
        ("the optimizer creates its state, which only the first step does: {match}",),
        frames=r".{0,200}",
        when=(_S.in_optimizer, _S.makes_state),
    ),
    Rule(
        "optimizer-state",
        "trl-2776",
        ("the traceback ends in the optimizer's step: {last}",),
        when=(_S.in_optimizer,),
    ),
    Rule(
        "kv-cache",
        "heartmula-12",
        ("memory ran out where the KV cache is made or grows: {match}",),
        near=r"(?i)kv_?cache|setup_caches|cache_utils|cache_engine|cat\(.{0,20}(past|cache|[kv]_prev)",
        unless=(_S.in_backward,),
    ),
    Rule(
        "weights",
        "lf-7781",
        (
            "memory ran out while a model was loaded: {match}",
            _WEIGHTS,
            "{allocated} were allocated",
        ),
        frames=r"_load_state_dict_into|set_module_tensor_to_device|from_pretrained$|load_model_dict"
        r"|create_weights|load_weights|_materialize_copy|create_quantized_param|load_model$"
        r"|bitsandbytes/functional\.py quantize_",
    ),
    Rule(
        "weights",
        "vllm-14095",
        ("memory ran out while the model was loaded: {match}", _WEIGHTS),
        log=r"processing method load_model|model failed to load|(?i:error loading model)|ggml-cuda\S{0,40}"
        r"|llama_model_load\S{0,40}",
    ),
    Rule(
        "weights",
        "reco-8",
        (
            "memory ran out while a model was built or moved: {place}",
            _WEIGHTS,
            "{allocated} were allocated",
        ),
        when=(_S.in_setup,),
    ),
    # ------------------------------------------------ evaluation
    Rule(
        "predictions",
        "hf-17089",
        ("the outputs of all batches are joined on the GPU: {match}",),
        failing=r" (nested_concat|torch_pad_and_concatenate|nested_gather|pad_across_processes"
        r"|dim_zero_cat|gather_for_metrics|_gpu_gather):",
        unless=(_S.in_backward,),
    ),
    Rule(
        "predictions",
        "hf-7158",
        ("the outputs of all batches are joined on the GPU: {match}",),
        failing=r"cat\(.{0,30}(pred|logit|output|score|feat|embed|result|all_)|(stack|vstack)\((pred|all_)",
        when=(_S.evaluates,),
    ),
    Rule(
        "vae-decode",
        "fooocus-1032",
        ("the picture is decoded at full size: {match}",),
        frames=r"(?i)(vae|autoencoder|first_stage)\S{0,60} (_?decode\w{0,20}|tiled_\w{1,20})"
        r"| (vae_decode|decode_first_stage|decode_latents|tiled_decode)",
        unless=(_S.in_backward,),
    ),
    Rule(
        "no-grad",
        "caption-57",
        ("memory ran out in {function}(): {place}", "{gradients}", "{trained}, so a step fits"),
        when=(_S.may_keep_graph, lambda s: s.trained or s.enables_grad),
        unless=(_S.generates, lambda s: not s.enables_grad and re.search(_LOGITS, s.failing)),
        decide="Print torch.is_grad_enabled() in {function}(): True means that this is it.",
    ),
    # ------------------------------------------------ what the failing lines compute
    Rule(
        "logits",
        "lf-6800",
        (
            "the failing line works on logits, tokens × vocabulary: {match}",
            "{requested} is {logits}",
        ),
        failing=_LOGITS,
        unless=(_S.in_optimizer, _S.in_backward),
    ),
    Rule(
        "no-grad",
        "pytorch-17793",
        ("memory ran out in {function}(): {place}", "{gradients}"),
        when=(_S.may_keep_graph,),
        unless=(_S.generates, _S.unallocated_nearly_serves),
        decide="Print torch.is_grad_enabled() in {function}(): True means that this is it.",
    ),
    Rule(
        "sequence",
        "lf-3398",
        ("the failing line computes attention scores: {match}", "the request is {scores}"),
        failing=r"attn_w|attn_scores|attention_scores|attention_probs|\batt\b|attn_prob|baddbmm"
        r"|\b(q|query|query_states|query_layer|xq)[ \t]{0,4}(@|,[ \t]{0,4}k)|attn[ \t]{0,4}="
        r"|bmm\(q|einsum\([^)]{0,60}(qk|bhqk|bhij|bhtt|bqd,bkd|b i d|q[^)]{0,60}k)"
        r"|scores?\b.{0,30}(masked_fill|softmax)|(?i:att\S{0,60} \w{0,60}: .{0,80}(softmax|matmul|masked_fill|bmm))",
        # torch's kernel stores no scores; a function of the user with such a name may.
        unless=(
            _S.in_optimizer,
            lambda s: re.search(r"(?<!\w)scaled_dot_product_attention\(", s.failing),
        ),
    ),
    Rule(
        "logits",
        "nanochat-443",
        ("the refused request of {requested} is {logits}",),
        when=(_S.logits_product,),
        unless=(_S.in_optimizer,),
    ),
    Rule(
        "logits",
        "axolotl-1813",
        ("backward of a language model asks for {requested} at once: {place}",),
        frames=_LANGUAGE + "|axolotl|llama_factory|llamafactory",
        when=(lambda s: s.in_backward and (s.message.requested or 0) > 1.5 * 2**30,),
    ),
    # ------------------------------------------------ growth, outliers, fragmentation
    Rule(
        "kept-graphs",
        "apegan-1",
        ("the failing line keeps the graph: {match}",),
        failing=r"retain_graph[ \t]{0,4}=[ \t]{0,4}True",
    ),
    Rule(
        "wddm-spill",
        "meshgen-7",
        (
            "{allocated} are allocated on a card of {capacity}: the driver already uses the "
            "computer's memory",
        ),
        when=(_S.spilled,),
        unless=(_S.unix, _S.engine_sleeps),
    ),
    Rule(
        "mps-other",
        "comfy-7440",
        ("{other} of {allowed} are this process's, but no tensor's", "tensors: {allocated}"),
        when=(_S.on_mps, _S.mps_other),
    ),
    Rule(
        "fragmentation",
        "crossfit-18",
        (
            "{free_reserved} are reserved but unallocated, more than the request of {requested}: no "
            "free block is large enough",
        ),
        when=(_S.unallocated_serves,),
        unless=(_S.on_mps,),
    ),
    Rule(
        "fragmentation",
        "czsl-7",
        (
            "{free_reserved} are reserved but unallocated; with the card's free {free} they would "
            "hold the request of {requested}",
        ),
        when=(_S.unallocated_nearly_serves,),
    ),
    Rule(
        "vllm-room",
        "aria-24",
        ("an inference engine fills its share of the card: {match}",),
        log=r"VllmWorker\w{0,20}|EngineCore\w{0,9}|RayWorkerWrapper|vllm[./]\S{0,60}|sglang\S{0,60}"
        r"|\[engine\.py:\d{1,6}\]|text_generation_(client|launcher|server)",
    ),
    Rule(
        "other-process",
        "autotrain-737",
        ("{elsewhere} of {whole} ({share}) are used outside this process", "{processes}"),
        when=(_S.others_some, _S.states_own),
        unless=(_S.others_like_a_desktop, _S.ran_before),  # many steps fitted beside the others
    ),
    Rule(
        "batch",
        "so-70074789",
        ("the request of {requested} alone is larger than the {free} that are free",),
        when=(
            lambda s: (s.message.requested or 0) > (s.message.free or 2**63),
            lambda s: (s.message.requested or 0) > 1.5 * (s.message.allocated or 2**63),
        ),
        unless=(_S.has_traceback, lambda s: re.search(_LANGUAGE + "|attn|atten", s.log.text)),
        decide="Print the shapes of the failing line's tensors: which of them is that large?",
        is_fallback=True,
    ),
    Rule(
        "sequence",
        "trl-1626",
        ("{requested} are requested at once, more than the {allocated} allocated before",),
        when=(lambda s: (s.message.requested or 0) > 1.5 * (s.message.allocated or 2**63),),
        decide="Print the shapes of the failing line's tensors, and the longest sample's length.",
    ),
    # ------------------------------------------------ CUDA's libraries, and a bare error
    Rule(
        "outside-allocator",
        "qwen3-873",
        ("a library allocates beside PyTorch's cache: {said}", _AT),
        "library",
    ),
    Rule(
        "outside-allocator",
        "nnunet-593",
        ("the ranks' first communication finds no memory: {match}",),
        "bare",
        near=r"distributed_c10d\.py \w{1,40}|torch/distributed/\S{1,60} \w{1,40}",
        decide="Run nvidia-smi while the job starts: does every rank use a GPU of its own?",
    ),
    Rule(
        "other-process",
        "gpt2chitchat-19",
        ("nvidia-smi shows a full card: {full_card}",),
        "bare",
        when=(_S.full_card,),
        decide="Was the table printed before this program started? Then others hold that memory.",
        is_fallback=True,
    ),
    Rule(
        "other-process",
        "pytorch-1829",
        ("the very first use of the card fails: {match}",),
        "bare",
        failing=r"torch\.(cuda\.)?\w{0,20}(Tensor\(|zeros|ones|rand|tensor\()|\.cuda\(\)|set_device|device="
        r"|\.to\((device|.cuda)",
        unless=(_S.trained, _S.in_step),
    ),
    # ------------------------------------------------ everything else: the step needs more
    Rule(
        "kept-graphs",
        "allennlp-2569",
        ("{steps} steps ran before this one failed, so memory grew or this batch was larger",),
        when=(_S.ran_before,),
        unless=(_S.evaluates, _S.in_optimizer, _S.on_mps),
        decide="Print torch.cuda.memory_allocated() after each step: steady growth is this cause, one "
        "jump is a longer batch.",
        is_fallback=True,
    ),
    Rule(
        "kv-cache",
        "machinepy-40",
        ("the log is one of text that is generated: {match}",),
        log=r"Generate config GenerationConfig.{0,3}|\btext2?text_generation\.py|\binput_length: \d{1,9}",
        unless=(_S.has_traceback, _S.trains, _S.trained),
        decide="Generate for one short input: if that fits, it is the cache; if not, the weights.",
        is_fallback=True,
    ),
    Rule(
        "weights",
        "slk-28",
        (
            "{allocated} of {whole} are allocated, and only {requested} more were refused",
            _WEIGHTS,
        ),
        when=(
            _S.fills_card,
            _S.small_request,
            lambda s: s.infers or s.on_mps or not s.has_traceback,
        ),
        unless=(_S.in_step, _S.trains, lambda s: _TRAINING_CODE.search(s.log.text)),
        decide="Print torch.cuda.memory_allocated() after the model is loaded: near the card's size, "
        "it is the weights; far below, the batch.",
        is_fallback=True,
    ),
    Rule(
        "batch",
        "generateu-10",
        ("memory ran out in {phase}: {place}", "the log prints a batch of {batch}"),
        when=(_S.in_step,),
        decide=_BATCH_OF_ONE,
        is_fallback=True,
    ),
    Rule(
        "batch",
        "vox2cortex-7",
        ("memory ran out at {place}", "the log prints a batch of {batch}"),
        decide=_BATCH_OF_ONE,
        is_fallback=True,
    ),
)


def text_findings(situation: TextSituation) -> tuple[Finding, ...]:
    """Return the cause of the first rule that applies, and then those of the next ones."""
    found: dict[str, Finding] = {}
    for rule, match in matching_rules(situation):
        if rule.cause not in found and len(found) < MOST_CAUSES:
            found[rule.cause] = finding_of(rule, match, situation)
    return tuple(found.values())


def matching_rules(situation: TextSituation) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that apply, in their order, each with the line that it matched."""
    for rule in RULES:
        match = rule.match(situation)
        if match is not None:
            yield rule, match


def finding_of(rule: Rule, match: str, situation: TextSituation) -> Finding:
    words = situation.words | {"match": match}
    right, called = counts().get(rule.example, (0, 0))
    lines = [line for line in rule.evidence if all(words.get(key) for key in _keys(line))]
    found = Finding(
        CAUSES[rule.cause],
        min((right + 0.5) / (called + 1), MOST_SURE if rule.is_fallback else 1),
        tuple(line.format_map(words) for line in lines),
        counts=(right, called),
        decide=rule.decide,
    )
    return for_log(found, situation)


def _keys(line: str) -> list[str]:
    return re.findall(r"\{(\w{1,40})\}", line)


@cache
def counts() -> dict[str, tuple[int, int]]:
    """How often each rule was right, and called, on the reports of tests/explain/corpus.jsonl."""
    read = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
    return {example: (right, called) for example, (right, called) in read.items()}
