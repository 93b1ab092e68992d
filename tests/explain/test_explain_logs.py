"""Logs as people post them: containers, notebooks, several ranks, loading, evaluation, long lines.

What a log says decides: names of functions are weak evidence, and advice that the log rules out is
not given.
"""

import re
from re import _constants, _parser

import pytest

from memlab.explain import advice, explain_text, messages, rules, summary, text_causes, tracebacks
from memlab.explain.findings import CONFIDENT
from memlab.explain.messages import read_log

GIB, MIB = 2**30, 2**20
SITE = "/env/lib/python3.12/site-packages"
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size}. GPU {gpu} has a total "
    "capacity of 23.64 GiB of which {free} is free. Including non-PyTorch memory, this process has "
    "23.00 GiB memory in use. Of the allocated memory 22.10 GiB is allocated by PyTorch, and "
    "400.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FULL = MESSAGE.format(size="1.00 GiB", gpu=0, free="650.00 MiB")
IN_CONTAINER = (
    "CUDA out of memory. Tried to allocate 108.00 MiB. GPU 0 has a total capacty of 15.89 GiB of "
    "which 65.12 MiB is free. Process 2670 has {own} memory in use. {more}Of the allocated memory "
    "15.36 GiB is allocated by PyTorch, and 168.02 MiB is reserved by PyTorch but unallocated."
)


def log(*frames: tuple[str, str, str], before: str = "", message: str = FULL) -> str:
    """Return a log with a traceback of (file, function, source)."""
    rows = [f'  File "{f}", line 9, in {name}\n    {source}' for f, name, source in frames]
    return "\n".join([before, "Traceback (most recent call last):", *rows, message])


MAIN = ("/home/me/train.py", "<module>", "main()")
CALL = (f"{SITE}/torch/nn/modules/module.py", "_call_impl", "return forward_call(*args)")
MLP = ("/home/me/model.py", "forward", "return self.down(self.up(x))")


def causes(text: str) -> list[str]:
    return [found.cause.name for found in explain_text(text).findings]


# ------------------------------------------------------------------ sizes


def test_the_own_process_of_a_container_is_not_another_process():
    """Torch lists it with a process id of the host, and leaves "this process has" out."""
    text = IN_CONTAINER.format(own="15.82 GiB", more="")
    message = read_log(text).message
    assert (message.processes, message.process) == ((), round(15.82 * GIB))
    assert "other-process" not in causes(text)


def test_beside_the_own_process_of_a_container_another_one_is_named():
    text = IN_CONTAINER.replace("15.36 GiB is", "8.00 GiB is")
    text = text.format(own="7.10 GiB", more="Process 9 has 8.60 GiB memory in use. ")
    message = read_log(text).message
    assert message.processes == ((2670, round(7.1 * GIB)),)
    assert causes(text)[0] == "other-process"


@pytest.mark.parametrize(("size", "times"), [("112.00 GiB", "4.7"), ("23.50 GiB", "1.0")])
def test_a_request_larger_than_the_card_is_the_cause(size, times):
    found = explain_text(MESSAGE.format(size=size, gpu=0, free="20.00 GiB"))
    assert found.cause == "request"
    assert f"is {times} times the card's 23.64 GiB" in found.findings[0].evidence[0]
    assert "other-process" not in {each.cause.name for each in found.findings}


def test_a_request_that_the_free_memory_could_serve_blames_no_other_process():
    text = (
        "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 "
        "MiB already allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch)"
    )
    assert causes(text)[0] == "page-file"  # 6.00 GiB in full: Windows
    assert causes(text.replace("6.00 GiB total", "5.93 GiB total"))[0] == "driver"


@pytest.mark.parametrize(("size", "is_fragmented"), [("6.00 GiB", True), ("8.00 GiB", False)])
def test_what_is_unallocated_may_fit_with_what_is_free(size, is_fragmented):
    """6 GiB would fit into 1.2 GiB of free memory and 5.9 GiB in partly used segments, 8 not."""
    text = (
        f"CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 23.64 GiB "
        "of which 1.20 GiB is free. Including non-PyTorch memory, this process has 22.40 GiB "
        "memory in use. Of the allocated memory 16.00 GiB is allocated by PyTorch, and 5.90 GiB is "
        "reserved by PyTorch but unallocated."
    )
    found = [each for each in explain_text(text).findings if each.cause.name == "fragmentation"]
    assert len(found) == is_fragmented
    if is_fragmented:
        assert "with the card's free 1.20 GiB they would hold" in found[0].evidence[0]


def test_a_limit_below_the_card_is_the_cause():
    text = MESSAGE.format(size="2.00 GiB", gpu=0, free="60.12 GiB").replace("23.64", "79.15")
    text = text.replace("Including", "16.00 GiB allowed; Including")
    assert causes(text)[0] == "limit"
    assert "set_per_process_memory_fraction" in explain_text(text).findings[0].todo[0]
    assert "limit" not in causes(text.replace("16.00 GiB allowed", "79.00 GiB allowed"))


def test_the_message_of_cuda_malloc_async_is_read_from_its_lines():
    message = read_log(
        "torch.cuda.OutOfMemoryError: Allocation on device 1 would exceed allowed memory. (out of "
        "memory)\nCurrently allocated     : 6.73 GiB\nRequested               : 20.00 MiB\n"
        "Device limit            : 8.00 GiB\nFree (according to CUDA): 0 bytes\n"
    ).message
    assert (message.allocated, message.requested) == (round(6.73 * GIB), 20 * MIB)
    assert (message.capacity, message.free, message.device) == (8 * GIB, 0, 1)


def test_a_message_quoted_with_angle_brackets_is_read():
    text = (
        "Hi, I get:\n\n> CUDA out of memory. Tried to allocate 1.25 GiB (GPU 0; 11.17 GiB total "
        "capacity; 9.50 GiB already\n> allocated; 1.06 GiB free; 9.80 GiB reserved in total by "
        "PyTorch)\n"
    )
    assert read_log(text).message.allocated == round(9.5 * GIB)


# ------------------------------------------------------------------ phases


@pytest.mark.parametrize(
    "frames",
    [
        [  # model.to("cuda")
            ("/home/me/run.py", "<module>", 'model = build().to("cuda")'),
            (f"{SITE}/torch/nn/modules/module.py", "to", "return self._apply(convert)"),
            (f"{SITE}/torch/nn/modules/module.py", "convert", "return t.to("),
        ],
        [  # a layer allocates its weights
            (f"{SITE}/vllm/model_executor/models/llama.py", "__init__", "self.up = Linear("),
            (f"{SITE}/vllm/layers/linear.py", "create_weights", "weight = torch.empty("),
        ],
    ],
)
def test_weights_that_do_not_fit_are_the_cause(frames):
    assert causes(log(*frames))[0] == "weights"


def test_a_batch_that_moves_to_the_gpu_builds_no_model():
    text = log(
        MAIN,
        ("/home/me/train.py", "main", "batch = batch.to(device)"),
        ("/home/me/data.py", "to", "return Batch(*(x.to(device) for x in self))"),
    )
    assert "weights" not in causes(text)


def test_code_that_is_no_forward_pass_is_not_called_one():
    text = log(MAIN, ("/home/me/train.py", "main", "table = torch.zeros(n, n, device=device)"))
    assert "no-checkpointing" not in causes(text)
    assert not any(
        "in forward" in line for found in explain_text(text).findings for line in found.evidence
    )


# ------------------------------------------------------------------ names of functions

VALIDATE = ("/home/me/train.py", "validate", "out = model(x)")


def test_a_name_alone_is_weak_evidence_and_training_before_makes_it_strong():
    alone = explain_text(log(MAIN, VALIDATE, CALL, MLP)).findings[0]
    after = explain_text(log(MAIN, VALIDATE, CALL, MLP, before="Epoch 1: train loss 2.3")).findings
    assert (alone.cause.name, after[0].cause.name) == ("no-grad", "no-grad")
    assert alone.confidence < CONFIDENT <= after[0].confidence
    assert not any("training" in line for line in alone.evidence)


@pytest.mark.parametrize(
    "frames",
    [
        [  # Lightning disables gradients in its evaluation loop
            (f"{SITE}/lightning/pytorch/loops/evaluation_loop.py", "run", "self._step(batch)"),
            ("/home/me/lit.py", "validation_step", "loss = self.model(x, y)"),
        ],
        [("/home/me/diffusion.py", "predict_noise", "return model(x_t, t)")],
        [("/home/me/rl.py", "evaluate_policy_and_train", "loss = model(x).mean()")],
    ],
)
def test_training_and_frameworks_that_disable_gradients_are_no_evaluation_with_them(frames):
    assert "no-grad" not in causes(log(MAIN, *frames, CALL, MLP))


def test_a_training_step_of_a_framework_does_not_disable_gradients():
    loop = (f"{SITE}/lightning/pytorch/loops/training_epoch_loop.py", "run", "self.advance()")
    step = ("/home/me/lit.py", "training_step", "loss = self.model(x, y)")
    assert causes(log(MAIN, loop, step, CALL, MLP)) == ["batch"]


def test_predictions_joined_on_the_gpu_are_the_cause():
    trainer = f"{SITE}/transformers/trainer.py"
    found = explain_text(
        log(
            (trainer, "evaluation_loop", "all_preds.add(logits)"),
            (f"{SITE}/transformers/trainer_pt_utils.py", "nested_concat", "return pad_and_cat("),
        )
    )
    assert found.cause == "predictions"
    assert any("eval_accumulation_steps" in line for line in found.findings[0].todo)
    assert found.findings[0].evidence[0].endswith("return pad_and_cat(")


@pytest.mark.parametrize(
    ("name", "source", "caches"),
    [
        ("decode", "h = self.up(h)", False),
        ("sample", "h = self.net(obs)", False),
        ("decode", "k = torch.cat([past_key, k], dim=2)", True),
    ],
)
def test_decode_and_sample_need_a_cache_to_be_a_generation(name, source, caches):
    assert ("kv-cache" in causes(log(MAIN, ("/home/me/vae.py", name, source)))) == caches


# ------------------------------------------------------------------ evidence and advice


def test_the_evidence_quotes_the_line_that_matched():
    modeling = (f"{SITE}/transformers/models/llama/modeling_llama.py", "forward", "x = x.float()")
    lines = [("/home/me/ft.py", "<module>", "trainer.train()"), CALL]
    text = log(*lines, (modeling[0], "forward", "logits = logits.float()"))
    [evidence] = explain_text(text).findings[0].evidence
    assert evidence.endswith(": llama/modeling_llama.py:9 forward: logits = logits.float()")


def test_the_message_is_no_source_line():
    text = f'Traceback (most recent call last):\n  File "a.py", line 6, in f\n{FULL}'
    assert read_log(text).line.source == ""


@pytest.mark.parametrize(
    ("before", "dropped"),
    [
        ("batch_size=1", "Halve the batch"),
        ("dtype bfloat16", "Use autocast"),
        ("bf16=True", "Use autocast"),
    ],
)
def test_advice_that_the_log_shows_as_done_is_not_given(before, dropped):
    def todo(text):
        found = explain_text(text).findings
        return [line for each in found if each.cause.name == "batch" for line in each.todo]

    frames = (MAIN, ("/home/me/model.py", "forward", "x = self.conv2(x)"))
    assert any(line.startswith(dropped) for line in todo(log(*frames)))
    assert not any(line.startswith(dropped) for line in todo(log(*frames, before=before)))


def test_all_advice_done_leaves_other_advice():
    text = log(MAIN, MLP, before="dtype bfloat16, batch_size=1, gradient checkpointing enabled")
    [found] = explain_text(text).findings
    assert [line.split()[0] for line in found.todo] == ["Shorten"]


@pytest.mark.parametrize(
    ("source", "casts"),
    [
        ("loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())", False),
        ("loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())", True),
        ("loss = F.cross_entropy(logits.to(torch.float32), y)", True),
        ("loss = F.cross_entropy(logits.to(torch.float16), y)", False),
    ],
)
def test_the_advice_to_drop_a_cast_needs_a_cast_in_the_failing_lines(source, casts):
    text = log(("/home/me/train.py", "<module>", "main(x.float())"), ("/a.py", "f", source))
    found = explain_text(text).findings[0]
    assert found.cause.name == "logits"
    assert any("16 bits" in line for line in found.todo) == casts


def test_an_evaluation_gets_no_advice_of_training():
    found = explain_text(log(MAIN, VALIDATE, CALL, MLP)).findings
    assert [each.cause.name for each in found] == ["no-grad", "batch"]
    assert found[1].todo == ("Run fewer inputs at once, or smaller ones (resolution, tokens).",)


def test_a_first_step_that_printed_its_training_loss_shows_that_training_ran():
    assert read_log(log(MAIN, before="Ep 1, Step 000000, Train: 9.5, Val: 9.6")).trained
    assert not read_log(log(MAIN, before="Step 0: loading the weights")).trained


def test_inference_gets_no_advice_of_training():
    decorator = (f"{SITE}/torch/utils/_contextlib.py", "decorate_context", "return f(*args)")
    [found] = explain_text(log(MAIN, decorator, CALL, MLP)).findings
    assert not any("accumulate" in line for line in found.todo)


OLD = (
    "CUDA out of memory. Tried to allocate 1.53 GiB (GPU 0; 23.69 GiB total capacity; 14.02 GiB "
    "already allocated; 412.00 MiB free; 22.40 GiB reserved in total by PyTorch) If reserved "
    "memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
NEW = (
    "{backend} out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 412.00 MiB is free. Of the allocated memory 14.02 GiB is allocated by PyTorch, and "
    "8.38 GiB is reserved by PyTorch but unallocated. {hint}"
)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        (OLD, "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"),
        (NEW.format(backend="CUDA", hint=""), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        (
            NEW.format(backend="HIP", hint="try PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"),
            "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True",
        ),
        (
            NEW.format(backend="CUDA", hint="try PYTORCH_ALLOC_CONF=expandable_segments:True"),
            "PYTORCH_ALLOC_CONF=expandable_segments:True",
        ),
    ],
)
def test_the_setting_has_the_name_and_the_options_of_the_messages_torch(text, setting):
    found = explain_text(text).findings[0]
    assert found.cause.name == "fragmentation"
    assert found.todo[0].startswith(f"Set {setting} ")


def test_a_worker_of_a_data_loader_does_not_blame_the_training():
    worker = (f"{SITE}/torch/utils/data/_utils/worker.py", "_worker_loop", "data = fetch(index)")
    item = ("/home/me/data.py", "__getitem__", "return self.encoder(image.cuda())")
    text = log(worker, item).replace("23.00 GiB memory", "512.00 MiB memory")
    text = text.replace("22.10 GiB is allocated", "120.00 MiB is allocated")
    found = explain_text(text.replace("400.00 MiB is reserved", "2.00 MiB is reserved"))
    assert found.cause == "other-process"
    assert not any("end the other process" in line for line in found.findings[0].todo)
    assert "no-checkpointing" not in {each.cause.name for each in found.findings}


# ------------------------------------------------------------------ ranks and notebooks


def test_the_traceback_of_the_rank_that_printed_the_message_is_read():
    """Two ranks print at the same time, line by line."""
    rows = [
        [
            f"[rank{rank}]: Traceback (most recent call last):",
            f'[rank{rank}]:   File "/home/me/{name}.py", line 4, in forward',
            f"[rank{rank}]:     x = self.mlp(x)",
            f"[rank{rank}]: {MESSAGE.format(size='1.00 GiB', gpu=rank, free='0 bytes')}",
        ]
        for rank, name in enumerate(("first", "second"))
    ]
    text = "\n".join(line for pair in zip(*rows, strict=True) for line in pair)
    found = read_log(text)
    assert (found.rank, found.message.device, found.failures) == (1, 1, 2)
    assert [line.frame.filename for line in found.lines] == ["/home/me/second.py"]
    explained = explain_text(text)
    assert "on GPU 1 (rank 1)" in summary.headline(explained)
    assert "2 out-of-memory messages" in next(summary.notes(explained))


def test_the_traceback_of_a_notebook_is_read():
    text = (
        "OutOfMemoryError                          Traceback (most recent call last)\n"
        "Cell In[12], line 5\n      4 out = model(x)\n----> 5 loss(out, y).backward()\n\n"
        f"File {SITE}/torch/_tensor.py:522, in Tensor.backward(self, gradient)\n"
        f"    512 if f:\n--> 522 torch.autograd.backward(\n\n{FULL}"
    )
    found = read_log(text)
    assert [line.frame.line for line in found.lines] == [5, 522]
    assert str(found.line) == "cell 12:5 <module>: loss(out, y).backward()"
    assert "in backward" in explain_text(text).findings[0].evidence[0]


# ------------------------------------------------------------------ long logs

LEAST_UNBOUNDED = 1000  # repetitions


def patterns_of_logs() -> dict[str, re.Pattern[str]]:
    modules = (messages, text_causes, advice, tracebacks)
    of_rules = {
        f"{rule.example} {part}": pattern
        for rule in rules.RULES
        for part, pattern in rule._patterns.items()
    }
    kinds = {f"messages {kind}": pattern for kind, pattern in messages._ERRORS.items()}
    return (
        of_rules
        | kinds
        | {
            f"{module.__name__}.{name}": value
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, re.Pattern)
        }
    )


def unbounded(parsed) -> bool:
    """Whether a pattern repeats something without a bound."""
    if isinstance(parsed, _parser.SubPattern):
        repeats = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
        most = [value[1] for kind, value in parsed if kind in repeats]
        return any(n >= LEAST_UNBOUNDED for n in most) or any(map(unbounded, parsed.data))
    return isinstance(parsed, tuple | list) and any(map(unbounded, parsed))


def test_the_work_for_a_character_does_not_depend_on_the_length_of_its_line():
    """Without unbounded repetition, a pattern sees a bounded part of the text from each place."""
    found = patterns_of_logs()
    assert len(found) > 20
    assert [
        name for name, pattern in found.items() if unbounded(_parser.parse(pattern.pattern))
    ] == []
    assert unbounded(_parser.parse(r"[\w ]*[:= ]\s*tensor"))  # as it was


def test_of_a_long_log_the_start_and_the_part_before_the_message_are_read():
    steps = "step 1 loss 2.0 allocated 21.0 GiB\n" * 40_000
    found = read_log(f"vocab_size=32000\n{steps}{log(MAIN, MLP)}")
    kept = messages.MOST_HEAD + messages.MOST_BEFORE + messages.WIDEST_MESSAGE
    assert len(found.text) <= kept + messages.WIDEST_PREFIX
    assert found.skipped_chars > len(steps) - kept
    assert found.numbers["vocabulary"] == 32000
    assert len(found.lines) == 2


def test_a_message_at_the_end_of_one_endless_line_is_read():
    found = read_log("x" * 300_000 + FULL)
    assert found.message.requested == GIB
    assert len(found.text) < messages.MOST_HEAD + messages.MOST_BEFORE


# ------------------------------------------------------------------ source files

VALIDATION = """\
def validate(model, x):
    with torch.AROUND:
        y = 1
        logits = model(x)
    return model(x)
"""


@pytest.mark.parametrize(
    ("around", "line", "is_named"),
    [
        ("no_grad()", 4, False),
        ("inference_mode()", 4, False),
        ("set_grad_enabled(False)", 4, False),
        ("autocast('cuda')", 4, True),
        ("no_grad()", 5, True),
    ],
)
def test_a_with_block_in_a_file_that_is_here_disables_gradients(tmp_path, around, line, is_named):
    file = tmp_path / "train.py"
    file.write_text(VALIDATION.replace("AROUND", around))
    frames = (MAIN, (str(file), "validate", "logits = model(x)"), CALL, MLP)
    text = log(*frames).replace(f'{file}", line 9', f'{file}", line {line}')
    assert ("no-grad" in causes(text)) is is_named
    file.unlink()
