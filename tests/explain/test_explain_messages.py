"""Every wording of torch's out-of-memory messages is read, and logs around them are understood."""

import pytest

import memlab
from memlab.explain import explain_text
from memlab.explain.messages import read_log
from memlab.explain.summary import needs_recording

GIB, MIB = 2**30, 2**20

TORCH_1_3 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.91 GiB total "
    "capacity; 10.20 GiB already allocated; 9.44 MiB free; 60.50 MiB cached)"
)
TORCH_1_13 = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.65 GiB total capacity; 21.10 GiB "
    "already allocated; 1.20 GiB free; 21.30 GiB reserved in total by PyTorch) If reserved memory "
    "is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
TORCH_2_1 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
    "total capacty of 23.65 GiB of which 1.20 GiB is free. Process 1234 has 10.00 GiB memory in "
    "use. Including non-PyTorch memory, this process has 12.40 GiB memory in use. 20.00 GiB "
    "allowed; Of the allocated memory 11.00 GiB is allocated by PyTorch, with 100.00 MiB allocated "
    "in private pools (e.g., CUDA Graphs), and 512.00 MiB is reserved by PyTorch but unallocated."
)
HIP = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total "
    "capacity of 63.98 GiB of which 0 bytes is free. Of the allocated memory 60.00 GiB is "
    "allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)
XPU = (
    "XPU out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 15.91 GiB. Of "
    "the allocated memory 14.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by "
    "PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory."
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB, "
    "max allowed: 18.13 GB). Tried to allocate 256.00 MB on private pool. Use "
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations."
)
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 4294967296 bytes. Error code 12"
)


@pytest.mark.parametrize(
    ("text", "backend", "requested", "capacity", "allocated", "free_reserved"),
    [
        (TORCH_1_3, "CUDA", 20 * MIB, 10.91 * GIB, 10.2 * GIB, 60.5 * MIB),
        (TORCH_1_13, "CUDA", 2 * GIB, 23.65 * GIB, 21.1 * GIB, 0.2 * GIB),
        (TORCH_2_1, "CUDA", 2 * GIB, 23.65 * GIB, 11 * GIB, 512 * MIB),
        (HIP, "HIP", 512 * MIB, 63.98 * GIB, 60 * GIB, 100 * MIB),
        (XPU, "XPU", GIB, 15.91 * GIB, 14 * GIB, 100 * MIB),
        (MPS, "MPS", 256 * MIB, None, 17 * GIB, None),
        (CPU, "CPU", 4 * GIB, None, None, None),
        ("RuntimeError: CUDA error: out of memory", "CUDA", None, None, None, None),
    ],
)
def test_each_wording_is_read(text, backend, requested, capacity, allocated, free_reserved):
    message = read_log(text).message
    found = (message.requested, message.capacity, message.allocated, message.free_reserved)
    assert message.backend == backend
    for got, wanted in zip(found, (requested, capacity, allocated, free_reserved), strict=True):
        assert got == (None if wanted is None else pytest.approx(wanted, abs=2))


def test_a_message_wrapped_over_lines_is_read():
    assert read_log(TORCH_2_1.replace(". ", ".\n")).message.processes == ((1234, 10 * GIB),)


def test_the_last_message_of_a_log_counts():
    text = f"{TORCH_1_3}\nretrying with a smaller batch\n{TORCH_1_13}"
    assert read_log(text).message.requested == 2 * GIB


def test_a_traceback_whose_message_states_no_sizes_explains_the_sizes_of_another_rank():
    frames = (
        '  File "train.py", line 9, in <module>\n    optimizer.step()\n'
        '  File "/lib/python3.8/site-packages/apex/optimizers/adam.py", line 112, in step\n'
        "    state['exp_avg'] = torch.zeros_like(p)\n"
    )
    traceback = f"Traceback (most recent call last):\n{frames}"
    found = explain_text(f"{TORCH_1_13}\n{traceback}RuntimeError: CUDA out of memory")
    assert found.cause == "optimizer-state"
    assert "2.00 GiB requested" in repr(found)


def test_a_negative_size_is_not_printed_as_a_huge_one():
    wrapped = TORCH_2_1.replace("2.00 GiB", "17179869113.53 GiB", 1)
    wrapped = wrapped.replace("process has 12.40 GiB", "process has 17179869184.00 GiB")
    assert explain_text(wrapped).cause == "request"
    assert "a negative size requested" in repr(explain_text(wrapped))
    assert "TiB" not in repr(explain_text(wrapped))
    assert read_log(wrapped).message.process is None


def test_a_text_without_a_message_is_refused():
    with pytest.raises(ValueError, match="no out-of-memory message"):
        read_log("step 1: loss 2.31")


def test_an_exception_is_explained_in_a_notebook(monkeypatch):
    """In the cell after an error, memlab.explain() explains the last one."""
    try:
        raise RuntimeError(TORCH_2_1)
    except RuntimeError as error:
        found = memlab.explain(error)
        monkeypatch.setattr("sys.last_value", error, raising=False)
    assert found.cause == memlab.explain().cause == "other-process"
    assert "cause: another process on the card" in repr(found)
    assert memlab.explain(TORCH_2_1).cause == "other-process"


def test_a_notebook_without_an_error_is_told_what_to_pass(monkeypatch):
    monkeypatch.setattr("sys.last_value", None, raising=False)
    with pytest.raises(ValueError, match="no exception was shown before"):
        memlab.explain()


def test_colours_boxes_and_prefixes_are_no_part_of_a_log():
    plain = "RuntimeError: " + TORCH_1_3.removeprefix("RuntimeError: ")
    for dressed in (
        f"\x1b[0;31mRuntimeError\x1b[0m: {plain.partition(': ')[2]}",
        f"│ {plain} │",
        f"(TrainWorker pid=812, ip=10.0.0.3) {plain}",
        f"\x1b[36m(WorkerDict pid=812)\x1b[0m {plain}",
        f"2024-05-06 07:08:09,123 - ERROR - {plain}",
        f"[rank3]: {plain}",
        f"E   {plain}",
        f"> > {plain}",
    ):
        assert read_log(dressed).message == read_log(plain).message


# ------------------------------------------------------------------ causes of logs

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size}. GPU 0 has a total "
    "capacity of 23.65 GiB of which 300.00 MiB is free. Including non-PyTorch memory, this process "
    "has 23.35 GiB memory in use. Of the allocated memory 22.50 GiB is allocated by PyTorch, and "
    "{unallocated} is reserved by PyTorch but unallocated."
)


def log(*frames: tuple[str, int, str, str], size="1.00 GiB", unallocated="350.00 MiB", before=""):
    """Return a log with a traceback of (file, line, function, source)."""
    rows = [f'  File "{f}", line {n}, in {name}\n    {source}' for f, n, name, source in frames]
    head = "Traceback (most recent call last):"
    return "\n".join([before, head, *rows, FULL.format(size=size, unallocated=unallocated)])


MAIN = ("train.py", 80, "<module>", "main()")
STEP = ("train.py", 61, "main", "loss = model(ids, labels)")
TORCH = "/env/lib/python3.12/site-packages/torch"
LAYER = ("model.py", 40, "forward", "x = block(x)")
MLP = ("model.py", 22, "forward", "return self.down(F.gelu(self.up(x)))")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            log(
                *(MAIN, ("train.py", 70, "main", "optimizer.step()")),
                (f"{TORCH}/optim/adamw.py", 150, "_init_group", 'state["exp_avg"] = zeros_like('),
            ),
            "optimizer-state",
        ),
        (log(MAIN, ("train.py", 90, "validate", "logits = model(x)"), LAYER, MLP), "no-grad"),
        (
            log(
                *(MAIN, STEP, ("model.py", 60, "forward", "F.cross_entropy(logits.float(), y)")),
                (f"{TORCH}/nn/functional.py", 3400, "cross_entropy", "return torch._C._nn.cross("),
                size="7.83 GiB",
            ),
            "logits",
        ),
        (
            log(*(MAIN, STEP, LAYER), ("model.py", 30, "forward", "att = q @ k.transpose(-2, -1)")),
            "sequence",
        ),
        (log(MAIN, STEP, LAYER, MLP, before="layers=32 batch_size=2"), "batch"),
        (
            log(*(MAIN, STEP), ("model.py", 9, "forward", "x = self.conv2(F.relu(self.conv1(x)))")),
            "batch",
        ),
        (log(MAIN, STEP, LAYER, MLP, unallocated="9.20 GiB"), "fragmentation"),
        (
            log(
                *(MAIN, ("chat.py", 5, "generate", "logits, past = model(x, past)")),
                ("model.py", 33, "forward", "k = torch.cat([past_key, k], dim=2)"),
            ),
            "kv-cache",
        ),
        (
            log(
                *(MAIN, STEP, LAYER, MLP),
                before="\n".join(f"step {n} loss 2.0 mem {6 + n / 10:.2f} GiB" for n in range(120)),
                size="20.00 MiB",
            ),
            "kept-graphs",
        ),
        (TORCH_2_1, "other-process"),
    ],
)
def test_the_cause_of_a_log_is_found(text, cause):
    assert explain_text(text).cause == cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (  # the state was made in an earlier step; this is the forward pass
            log(MAIN, STEP, LAYER, MLP, before="step 400 loss 2.1"),
            "optimizer-state",
        ),
        (  # a decorator disables gradients
            log(
                *(MAIN, (f"{TORCH}/utils/_contextlib.py", 116, "decorate_context", "return f()")),
                *(("train.py", 90, "validate", "logits = model(x)"), LAYER, MLP),
            ),
            "no-grad",
        ),
        (log(MAIN, STEP, LAYER, MLP, unallocated="900.00 MiB"), "fragmentation"),
        (  # the fused attention stores no scores
            log(
                *(MAIN, STEP, LAYER),
                ("model.py", 30, "forward", "y = F.scaled_dot_product_attention(q, k, v)"),
            ),
            "sequence",
        ),
        (FULL.format(size="1.00 GiB", unallocated="350.00 MiB"), "other-process"),
        (  # memory that rises and falls is no leak
            log(
                *(MAIN, STEP, LAYER, MLP),
                before="\n".join(f"step {n} mem {9 + n % 3:.2f} GiB" for n in range(12)),
            ),
            "kept-graphs",
        ),
    ],
)
def test_a_near_miss_of_a_log_has_another_cause(text, cause):
    assert explain_text(text).cause not in (cause, None)


@pytest.mark.parametrize(
    "row",
    [
        "step {n} loss 2.0 mem {gib:.1f} GiB\n",
        "{n}/1000 [00:10<01:00] loss=2.0, mem={gib:.1f}G\r",
    ],
)
def test_many_steps_in_progress_lines_are_noticed(row):
    before = "".join(row.format(n=n, gib=6 + n / 10) for n in range(1, 90))
    text = log(MAIN, STEP, LAYER, MLP, before=before, size="20.00 MiB")
    assert explain_text(text).cause == "kept-graphs"


def test_a_request_equal_to_a_product_of_printed_sizes_is_named():
    text = log(
        *(MAIN, STEP, ("model.py", 60, "forward", "loss = self.loss_fn(logits, y)")),
        size="3.91 GiB",
        before="batch_size=8 seq_len=4096 vocab_size=32000",
    )
    evidence = explain_text(text).findings[0].evidence
    assert any("8 × 4,096 tokens × 32,000 logits in float32" in line for line in evidence)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("scores = torch.einsum('bqd,bkd->bqk', Q, K) / math.sqrt(d)", "sequence"),
        ("return scaled_dot_product_attention(Q, K, V)", "batch"),
    ],
)
def test_only_torchs_attention_stores_no_scores(line, cause):
    log = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 13, in custom_scaled_dot_product_attention\n'
        f"    {line}\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a "
        "total capacity of 8.00 GiB of which 100.00 MiB is free. Of the allocated memory 7.20 GiB "
        "is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )
    assert explain_text(log).cause == cause


MOSTLY_FREE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 60.00 MiB. GPU 0 has a total "
    "capacity of 11.00 GiB of which 4.48 GiB is free. Of the allocated memory 5.19 GiB is "
    "allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(("folder", "is_windows"), [("C:\\sd\\", True), ("/home/u/sd/", False)])
def test_a_folder_of_unix_is_none_of_windows(folder, is_windows):
    text = f'Traceback (most recent call last):\n  File "{folder}train.py", line 1\n{MOSTLY_FREE}'
    assert (explain_text(text).cause == "page-file") == is_windows


def test_a_gather_of_zero_3_is_the_cause_unless_a_step_runs_it():
    files = ["zero/partition_parameters.py", "zero/partitioned_param_coordinator.py"]
    inner, coordinator = (f"/lib/site-packages/deepspeed/runtime/{file}" for file in files)
    gather = f'  File "{inner}", line 1522, in _all_gather\n    self._allgather(params)\n'
    step = f'  File "{coordinator}", line 9, in fetch_sub_module\n    self.fetch(params)\n'
    head = "Traceback (most recent call last):\n"
    assert explain_text(f"{head}{gather}{TORCH_1_3}").cause == "fsdp-state-dict"
    assert explain_text(f"{head}{step}{gather}{TORCH_1_3}").cause != "fsdp-state-dict"


def test_jax_is_told_to_take_less_if_the_card_was_full_before():
    small = "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes."
    before = "cuda_dnn.cc:413] There was an error before creating cudnn handle (2): out of memory"
    assert "jax.checkpoint" in repr(explain_text(small))
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in repr(explain_text(f"{before}\n{small}"))


def test_rays_largest_process_is_named():
    text = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
    text += (
        "\nMemory on the node where the task was running was 215.43GB / 226.25GB (0.95). Top 10:"
    )
    text += "\nPID  MEM(GB) COMMAND\n81\t3.30\tray::Small\n13377  207.83 ray::Large.__call__"
    answer = repr(explain_text(text))
    assert "the node used 215.43GB of 226.25GB, most of it ray::Large.__call__" in answer
    assert "task.options(memory=" in answer


def test_ctranslate2s_words_are_read():
    """Its message for memory, and for a cuDNN that it cannot load (faster-whisper#408)."""
    assert explain_text("RuntimeError: CUDA failed with error out of memory").cause != "not-oom"
    words = "RuntimeError: cuDNN failed with status CUDNN_STATUS_NOT_INITIALIZED"
    assert explain_text(words).cause == "not-oom"


def test_a_percentage_before_the_count_of_steps_is_no_step():
    bar = "steps:   0%|          | {n}/2100 [00:03<2:05:34,  3.59s/it, loss=0.473]\n"
    assert [read_log(bar.format(n=n) + MOSTLY_FREE).steps_done for n in (0, 7)] == [0, 7]


def test_a_signal_alone_does_not_say_why():
    [first, *_] = explain_text("exitcode  : -9 (pid: 4711)").findings
    assert first.cause.name == "host-ram"
    assert first.confidence < 0.9


def test_a_message_that_was_cut_does_not_tell_processes_apart():
    """The process that it names may be this one: in a container, pids differ."""
    whole = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.47 GiB. GPU 0 has a total "
        "capacity of 14.75 GiB of which 3.79 GiB is free. Process 2116 has 10.95 GiB memory in "
        "use. "
    )
    own = "Of the allocated memory 1.20 GiB is allocated by PyTorch, and 0.10 GiB is reserved"
    causes = [explain_text(text).cause for text in (whole + "Of th", f"{whole}{own} by PyTorch.")]
    assert causes[0] != "other-process"
    assert causes[1] == "other-process"


@pytest.mark.parametrize("row", ["Total batch size = 8 | Total steps = 60", "max steps: 60"])
def test_planned_steps_are_no_progress(row):
    assert read_log(f"training, loss\n{row}\n{MOSTLY_FREE}").steps_done is None


def test_a_table_of_nvidia_smi_above_a_bare_error_shows_a_full_card():
    table = "| N/A   54C    P0   246W / 300W |  {} / 16130MiB |    100%      Default |\n"
    error = "RuntimeError: CUDA error: out of memory"
    full, empty = (explain_text(table.format(used) + error) for used in ("15514MiB", "10MiB"))
    assert full.cause == "other-process"
    assert "15514MiB / 16130MiB" in repr(full)
    assert empty.cause != "other-process"


def test_an_exception_in_unknown_words_for_out_of_memory_is_a_memory_problem():
    frame = 'Traceback (most recent call last):\n  File "net.py", line 9, in <module>\n    run()\n'
    words = "RuntimeError: [enforce fail at event_gpu.cc:17] error == cudaSuccess. 2 vs 0: {}"
    assert explain_text(frame + words.format("out of memory")).cause != "not-oom"
    assert explain_text(frame + words.format("invalid handle")).cause == "not-oom"


def test_a_log_of_generated_text_without_a_traceback_blames_the_cache():
    line = "[INFO|configuration_utils.py:577] Generate config GenerationConfig {\n"
    full = TORCH_1_13.replace("21.10", "22.99").replace("2.00 GiB", "16.00 MiB")
    assert explain_text(line + full).cause == "kv-cache"
    assert explain_text(full).cause == "weights"


def test_what_ran_for_many_steps_blames_neither_fragmentation_nor_others_at_once():
    message = TORCH_1_13.replace("23.65", "26.65").replace("21.30 GiB res", "23.20 GiB res")
    for before, cause in (
        ("", "fragmentation"),
        ("epoch 001: 11125 / 140589 loss=5.1", "kept-graphs"),
    ):
        assert explain_text(f"{before}\n{message}").cause == cause


def test_a_desktop_beside_the_training_is_not_blamed():
    text = TORCH_1_13.replace("23.65 GiB total", "{:.2f} GiB total")
    for whole, blamed in ((23.65 + 1.8, False), (23.65 + 3, True)):
        causes = [each.cause.name for each in explain_text(text.format(whole)).findings]
        assert ("other-process" in causes) == blamed


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("(raylet) 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0", "host-ram"),
        (
            "see https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html",
            "host-ram",
        ),
        ("ERROR - Error Code 2: OutOfMemory (Requested size was 149635638784 bytes.)", "batch"),
        ("!!! Exception during processing !!! Allocation on device", "batch"),
        (
            "[W831 CUDACachingAllocator.cpp:508] expandable_segments: memory mapping failed with "
            "OOM on device 0 while trying to map 20971520 bytes (free: 156631, total: 33671348224)",
            "batch",
        ),
    ],
)
def test_other_words_for_out_of_memory_are_read(text, cause):
    assert explain_text(text).cause == cause


def test_the_hint_to_compile_with_assertions_is_no_evidence():
    fault = "RuntimeError: CUDA error: device-side assert triggered\n"
    hint = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    [first, *_] = explain_text(fault + hint).findings
    assert first.cause.name == "not-oom"
    assert "assert triggered" in first.evidence[0]


ASSERT = (
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":9'
)
MUCH_FREE = (
    "CUDA out of memory. Tried to allocate 128.00 MiB (GPU 0; 44.99 GiB total capacity; 6.15 GiB "
    "already allocated; 37.32 GiB free; 6.15 GiB reserved in total by PyTorch)"
)


def test_an_assert_of_the_message_itself_is_out_of_memory():
    answer = repr(explain_text(f"RuntimeError: {ASSERT}"))
    assert "memory ran out, and NVML could not say who holds it" in answer
    assert "no memory problem" not in answer


def test_a_message_without_a_sign_of_windows_could_be_windows_or_the_driver():
    found = explain_text(MUCH_FREE)
    assert [each.cause.name for each in found.findings[:2]] == ["page-file", "driver"]
    assert not any(each.word.startswith("high") for each in found.findings)
    assert "On Linux" in repr(found)


@pytest.mark.parametrize(
    "sign", ["root@DESKTOP-A:~#", "cd /mnt/c/chat", "Linux-5.15-microsoft-standard-WSL2-x86"]
)
def test_much_free_memory_in_wsl_is_told_of_its_limit(sign):
    answer = repr(explain_text(f"{MUCH_FREE}\n{sign}"))
    assert "cause: WSL2" in answer
    assert ".wslconfig" in answer


ALLOCATING = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 2048.00 MiB on device 0: "
ALLOCATING += "cudaMalloc failed: out of memory\n"
COMPUTE = "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 2147483648\n"
COMPUTE += "llama_new_context_with_model: failed to allocate compute buffers"
KV_CACHE = "llama_kv_cache_init: failed to allocate buffer for kv cache"
LOADING = "llama_model_load: error loading model: unable to allocate CUDA0 buffer"


@pytest.mark.parametrize(
    ("log", "of_what", "option"),
    [
        (ALLOCATING + COMPUTE, "its compute buffer", "-ub 128"),
        (f"(n_copies=4)\n{ALLOCATING}{COMPUTE}", "its compute buffer", "MAX_COPIES=1"),
        (ALLOCATING + KV_CACHE, "the KV cache", "-ctk q8_0"),
        (ALLOCATING + LOADING, "weights", "-ngl 20"),
    ],
)
def test_llama_cpp_is_told_the_option_of_the_buffer_that_failed(log, of_what, option):
    answer = repr(explain_text(log))
    assert f"llama.cpp asks for 2.00 GiB for {of_what}" in answer
    assert "2.00 GiB requested" in answer
    assert option in answer
    assert "accumulate" not in answer


ON_HOST = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 24053760000 bytes."
ARRAY = (
    "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 26.3 GiB for an array with shape "
)
ARRAY += "(1000000, 1, 4, 84, 84) and data type uint8"


@pytest.mark.parametrize(
    ("source", "error", "remedy"),
    [
        ("out = torch.cat(v, dim=0)", ON_HOST, "Keep no outputs"),
        ("self.obs = np.zeros((self.buffer_size, 4))", ARRAY, "Make the buffer"),
        ("data = load(path)", ON_HOST, "Keep less in RAM"),
    ],
)
def test_the_remedy_of_host_memory_is_about_the_line_that_asks(source, error, remedy):
    frame = f'  File "run.py", line 9, in <module>\n    {source}'
    first = explain_text(f"Traceback (most recent call last):\n{frame}\n{error}").findings[0]
    assert first.cause.name == "host-ram"
    assert first.todo[0].startswith(remedy)


def test_a_line_of_the_kernel_says_what_the_killed_process_held():
    line = "[8563.77] Out of memory: Killed process 41 (python) total-vm:79905000kB, "
    line += "anon-rss:2097152kB, file-rss:0kB, shmem-rss:1048576kB, UID:1000"
    answer = repr(explain_text(line))
    assert "held 3.00 GiB of RAM" in answer
    assert "Add memory or swap" in answer
    assert "dmesg" not in answer


def test_vllm_is_told_the_length_that_fits():
    log = "ValueError: The model's max seq len (8192) is larger than the maximum number of tokens "
    log += "that can be stored in KV cache (6048)."
    [first, *_] = explain_text(log).findings
    assert "6048" in first.code
    assert "8192" not in first.code


def test_a_request_larger_than_what_is_free_is_no_attention_without_a_sign_of_it():
    message = (
        "CUDA out of memory. Tried to allocate 5.37 GiB (GPU 0; 7.79 GiB total capacity; 742.54 "
    )
    message += "MiB already allocated; 5.13 GiB free; 792.00 MiB reserved in total by PyTorch)"
    [first, *_] = explain_text(message).findings
    assert first.cause.name == "batch"
    assert first.evidence[0].startswith("the request of 5.37 GiB alone is larger than the 5.13 GiB")
    attends = '  File "run.py", line 9, in attention\n    y = self.attention(x)\n'
    traceback = f"Traceback (most recent call last):\n{attends}{message}"
    assert explain_text(traceback).cause == "sequence"


def test_a_request_larger_than_the_card_shows_the_line_of_the_library_that_asks():
    cell = "RuntimeError    Traceback (most recent call last)\n"
    cell += "Cell In[9], line 3\n----> 3 model.fit(x)\n\n"
    library = "~/site-packages/geometric/dense.py in to_dense(edges)\n"
    library += "---> 48     adj = torch.zeros(size)\n\n"
    torchs = "~/site-packages/torch/functional.py in g(x)\n---> 7     return h(x)\n\n"
    message = (
        "RuntimeError: CUDA out of memory. Tried to allocate 597.53 GiB (GPU 0; 16.00 GiB total "
    )
    message += "capacity; 1.32 GiB already allocated; 12.78 GiB free; 1.35 GiB reserved in total)"
    answer = repr(explain_text(cell + library + torchs + message))
    assert "48 to_dense: adj = torch.zeros(size)" in answer.replace("\n  ", " ")


def test_the_sizes_of_paddles_message_are_shown():
    log = (
        "Out of memory error on GPU 0. Cannot allocate 25.0MB memory on GPU 0, available memory is "
    )
    log += "only 15.0MB.\n(at /paddle/paddle/fluid/memory/allocation/cuda_allocator.cc:69)"
    [headline, *_] = repr(explain_text(log)).splitlines()
    assert headline == "log: out of memory on GPU 0: 25.00 MiB requested, 15.00 MiB free"


def test_the_processes_that_a_message_names_are_in_the_answer():
    message = (
        "CUDA out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total capacity of 11.66 GiB "
    )
    message += "of which 9.81 MiB is free. Process 89 has 618.00 MiB memory in use. Including "
    message += (
        "non-PyTorch memory, this process has 11.04 GiB memory in use. Of the allocated memory "
    )
    message += (
        "10.60 GiB is allocated by PyTorch, and 163.19 MiB is reserved by PyTorch but unallocated."
    )
    assert repr(explain_text(message)).count("process 89 has 618.00 MiB") == 1


def test_a_log_of_other_software_is_not_told_to_record_with_torch():
    assert not needs_recording(explain_text(ALLOCATING + COMPUTE))
    assert needs_recording(explain_text(TORCH_1_13))
