"""`memlab.monitor`: finds steps, counts their memory, warns once, and explains an OOM."""

import sys
import types
import warnings

import pytest
import torch
from fake_devices import GIB, FakeAllocator
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as global_hooks

import memlab
from memlab.monitoring import FragmentationWarning, LeakWarning, MemoryWarning, snapshots

MIB = 2**20


@pytest.fixture
def gpu(monkeypatch):
    return FakeAllocator().install(monkeypatch)


@pytest.fixture(autouse=True)
def no_hook_left():
    yield
    assert not global_hooks


def linear(size: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(size, size)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps: int, *optimizers: torch.optim.Optimizer) -> None:
    for _ in range(steps):
        for optimizer in optimizers or (linear()[1],):
            optimizer.step()


def leaking(gpu: FakeAllocator, monitor: memlab.monitor) -> None:
    for _ in range(50):
        gpu.step(GIB, kept=64 * MIB)
        monitor.step()


# ------------------------------------------------------------------ steps


def test_each_step_has_its_own_peak_and_growth(gpu):
    monitor = memlab.monitor("cuda:0")
    gpu.step(3 * GIB, kept=GIB)
    assert monitor.step() == (1, 4 * GIB, GIB, 4 * GIB, 0)
    gpu.step(2 * GIB, kept=5 * MIB)
    second = monitor.step()
    assert (second.peak_bytes, second.growth_bytes) == (3 * GIB + 5 * MIB, 5 * MIB)
    assert (monitor.peak_bytes, monitor.peak_step) == (4 * GIB, 1)
    assert gpu.resets == 2


def test_the_devices_peak_counter_can_be_left_alone(gpu):
    monitor = memlab.monitor("cuda:0", reset_peak=False)
    for activations in (3 * GIB, GIB):
        gpu.step(activations)
        assert monitor.step().peak_bytes == 3 * GIB
    assert gpu.resets == 0


def test_steps_are_found_by_the_optimizers_own():
    _, optimizer = linear()
    with memlab.monitor("cpu") as monitor:
        train(3, optimizer)
    assert monitor.num_steps == 3
    train(2, optimizer)
    assert monitor.num_steps == 3


def test_several_optimizers_make_one_step():
    optimizers = [linear()[1] for _ in range(3)]
    with memlab.monitor("cpu") as monitor:
        train(4, *optimizers)
    assert monitor.num_steps == 4


def test_the_next_optimizer_takes_over_when_the_first_is_gone():
    with memlab.monitor("cpu") as monitor:
        train(2, linear()[1])
        train(2, linear()[1])
    assert monitor.num_steps == 4


def test_steps_marked_by_hand_replace_those_that_were_found(gpu):
    _, optimizer = linear()
    with memlab.monitor("cuda:0") as monitor:
        for _ in range(3):
            for _ in range(2):  # two updates are one step
                gpu.step(GIB)
                optimizer.step()
            monitor.step()
    assert monitor.num_steps == 3
    assert [step.step for step in monitor.recent] == [1, 2, 3]
    assert monitor.recent[0].peak_bytes == GIB  # seen by the step that was found


def test_a_loop_over_batches_marks_its_steps():
    monitor = memlab.monitor("cpu")
    batches = monitor.steps([10, 20, 30])
    assert len(batches) == 3
    assert list(batches) == [10, 20, 30]
    assert monitor.num_steps == 3


def test_steps_can_have_numbers_of_their_own():
    monitor = memlab.monitor("cpu")
    assert monitor.step(500).step == 500


def test_the_device_is_that_of_the_first_optimizer(monkeypatch):
    with memlab.monitor() as monitor:
        train(1)
    assert "on cpu: peak" in str(monitor)


def test_a_compiled_optimizer_step_counts(recwarn):
    _, optimizer = linear()
    step = torch.compile(optimizer.step, backend="eager")
    with memlab.monitor("cpu") as monitor:
        step()
        step()
    torch._dynamo.reset()
    assert monitor.num_steps == 2


def test_a_monitor_with_wrong_arguments_says_what_is_right():
    with pytest.raises(ValueError, match="every=0"):
        memlab.monitor(every=0)
    with pytest.raises(ValueError, match=r"dump_at=95.*such as 0\.95"):
        memlab.monitor(dump_at=95)
    with pytest.raises(TypeError, match="got a int to log to"):
        memlab.monitor().log_to(3)


# ------------------------------------------------------------------ lines and loggers


def test_nothing_is_printed_while_all_is_well(gpu, capfd):
    with memlab.monitor("cuda:0"):
        train(20)
    assert capfd.readouterr() == ("", "")


def test_a_line_every_so_many_steps_and_a_summary(gpu, capsys):
    with memlab.monitor("cuda:0", every=2) as monitor:
        for kept in (GIB, 0, MIB, 0):
            gpu.step(GIB, kept)
            monitor.step()
    assert capsys.readouterr().out == (
        "step 2: peak 2.00 GiB, 1.00 GiB after the step, 2.00 GiB reserved, "
        "growth +0 B in 2 steps\n"
        "step 4: peak 2.00 GiB, 1.00 GiB after the step, 2.00 GiB reserved, "
        "growth +1.00 MiB in 2 steps\n"
        "4 steps on cuda:0: peak 2.00 GiB in step 3, 1.00 GiB after the last step, "
        "2.00 GiB reserved\n"
    )


def test_without_steps_the_summary_says_how_to_mark_them():
    assert "call monitor.step()" in str(memlab.monitor())


def test_a_function_gets_names_values_and_steps(gpu):
    seen = []
    monitor = memlab.monitor("cuda:0").log_to(lambda *value: seen.append(value), every=2)
    for activations in (2 * GIB, GIB):
        gpu.step(activations, kept=MIB)
        monitor.step()
    assert seen == [
        ("memory/peak_allocated", 2 * GIB + MIB, 2),
        ("memory/reserved", 2 * GIB + MIB, 2),
        ("memory/growth", MIB, 2),
    ]


def test_the_cpu_has_no_reserved_memory_to_log():
    seen = []
    memlab.monitor("cpu").log_to(lambda name, value, step: seen.append(name)).step()
    assert seen == ["memory/peak_allocated", "memory/growth"]


def test_tensorboards_writer_gets_scalars(gpu):
    class Writer:
        def __init__(self):
            self.scalars = {}

        def add_scalar(self, tag, scalar_value, global_step=None):
            self.scalars[tag, global_step] = scalar_value

    writer = Writer()
    gpu.step(GIB)
    memlab.monitor("cuda:0").log_to(writer).step(7)
    assert writer.scalars["memory/peak_allocated", 7] == GIB


def test_the_real_writer_of_tensorboard_gets_scalars(gpu, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    with tensorboard.SummaryWriter(tmp_path) as writer:
        memlab.monitor("cuda:0").log_to(writer).step()
    assert list(tmp_path.iterdir())


def test_a_run_of_wandb_gets_values_that_do_not_move_its_step(gpu):
    class Run:
        def __init__(self):
            self.rows = []

        def log(self, data, step=None, commit=None):
            self.rows.append((data, step, commit))

    run = Run()
    gpu.step(GIB)
    memlab.monitor("cuda:0").log_to(run).step()
    values = {"memory/peak_allocated": GIB, "memory/reserved": GIB, "memory/growth": 0}
    assert run.rows == [(values, None, False)]


# ------------------------------------------------------------------ warnings


def test_a_leak_is_reported_once_with_its_rate_and_the_time_that_is_left(gpu):
    monitor = memlab.monitor("cuda:0")
    with pytest.warns(LeakWarning) as caught:
        leaking(gpu, monitor)
    [warning] = caught
    assert str(warning.message) == (
        "The tensors left after each step grew from 256.00 MiB to 960.00 MiB on cuda:0 in 11 "
        "steps, by 64.00 MiB per step. The memory will be full in about 369 more steps. Look for "
        "code that keeps tensors of earlier steps: a list of losses or outputs (append "
        "`loss.item()`), a sum of losses (add `loss.detach()`), a metric or a cache without a "
        "reset. If a buffer grows by design, ignore memlab.monitoring.LeakWarning."
    )
    assert warning.filename == __file__


def test_a_leak_that_would_take_a_million_steps_is_not_reported(gpu):
    monitor = memlab.monitor("cuda:0")
    for _ in range(5000):
        gpu.step(GIB, kept=512)
        monitor.step()


def test_a_leak_that_a_training_keeps_in_a_list_is_reported_on_the_cpu():
    model, optimizer = linear(16)
    kept = []

    def train() -> None:
        for _ in range(60):
            kept.append(torch.ones(16 * MIB, dtype=torch.uint8))
            model(torch.ones(4, 16)).sum().backward()
            optimizer.step()

    with pytest.warns(LeakWarning, match="process memory") as caught, memlab.monitor("cpu"):
        train()
    assert caught[0].filename == __file__  # not torch's, where the optimizer calls the monitor


def test_a_training_without_a_leak_is_not_warned_of():
    model, optimizer = linear(512)
    with memlab.monitor("cpu"):
        for _ in range(200):
            optimizer.zero_grad()
            model(torch.ones(256, 512)).sum().backward()
            optimizer.step()


def test_fragmentation_is_reported_once_with_a_remedy(gpu, monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monitor = memlab.monitor("cuda:0")

    def train() -> None:
        for n in range(80):
            gpu.step(12 * GIB)
            gpu.reserved = 13 * GIB + n // 10 * GIB
            monitor.step()

    with pytest.warns(FragmentationWarning) as caught:
        train()
    [warning] = caught
    assert str(warning.message) == (
        "The allocator reserves 16.00 GiB on cuda:0, and tensors used at most 12.00 GiB. 4.00 GiB "
        "(25%) are lost to fragmentation. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
        "before the program starts."
    )


def test_the_remedy_is_another_where_expandable_segments_are_on(gpu, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monitor = memlab.monitor("cuda:0")
    gpu.step(12 * GIB)
    monitor.step()
    gpu.reserved, gpu.retries = 20 * GIB, 1
    with pytest.warns(FragmentationWarning, match="Pad batches") as caught:
        monitor.step()
    assert "empty its cache 1 time to serve" in str(caught[0].message)


def test_the_remedy_on_rocm_has_no_expandable_segments(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monitor = memlab.monitor("cuda:0")
    gpu.step(12 * GIB)
    monitor.step()
    gpu.reserved, gpu.retries = 20 * GIB, 1
    with pytest.warns(FragmentationWarning, match="max_split_size_mb"):
        monitor.step()


def test_retries_of_full_memory_ask_for_a_smaller_batch(gpu):
    monitor = memlab.monitor("cuda:0")
    gpu.step(23 * GIB)
    monitor.step()
    gpu.retries = 2
    with pytest.warns(FragmentationWarning, match="The memory of cuda:0 is full") as caught:
        monitor.step()
    assert "empty its cache 2 times" in str(caught[0].message)


def test_all_warnings_have_a_class_of_their_own():
    assert issubclass(LeakWarning, MemoryWarning)
    assert issubclass(FragmentationWarning, MemoryWarning)
    assert issubclass(MemoryWarning, UserWarning)


# ------------------------------------------------------------------ out of memory


def test_a_peak_near_the_capacity_writes_one_snapshot(gpu, tmp_path):
    monitor = memlab.monitor("cuda:0", dump_at=0.9, snapshot_dir=tmp_path)

    def train() -> None:
        for activations in (GIB, 22 * GIB, 23 * GIB):
            gpu.step(activations)
            monitor.step()

    with pytest.warns(MemoryWarning, match=r"Step 2 used 22\.00 GiB at its peak, 92% of") as caught:
        train()
    path = tmp_path / "memlab-full-step2.pickle"
    assert gpu.snapshots == [str(path)]
    assert str(caught[0].message).endswith(f"Snapshot: {path}")
    assert path.exists()


def test_a_history_is_recorded_inside_with_and_dumps_at_95_percent(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "cuda_history_is_on", lambda: False)
    with memlab.monitor("cuda:0", history=True, max_entries=7, snapshot_dir=tmp_path) as monitor:
        assert gpu.recording == ("all", {"stacks": "python", "max_entries": 7})
        gpu.step(23 * GIB)
        with pytest.warns(MemoryWarning, match="96%"):
            monitor.step()
    assert gpu.recording is None


def test_a_history_that_was_already_recorded_goes_on(gpu, monkeypatch):
    gpu.recording = ("theirs", {})
    monkeypatch.setattr(snapshots, "cuda_history_is_on", lambda: True)
    with memlab.monitor("cuda:0", history=True):
        assert gpu.recording == ("theirs", {})
    assert gpu.recording == ("theirs", {})


def test_without_with_a_history_begins_after_the_first_step(gpu, monkeypatch):
    monkeypatch.setattr(snapshots, "cuda_history_is_on", lambda: False)
    monitor = memlab.monitor("cuda:0", history=True)
    assert gpu.recording is None
    monitor.step()
    assert gpu.recording is not None


def oom() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_the_observer_writes_the_snapshot_before_the_error_leaves(
    gpu, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "memlab.explain", None)
    monitor = memlab.monitor("cuda:0", snapshot_dir=tmp_path)

    def train() -> None:
        for _ in range(3):
            gpu.step(20 * GIB, kept=GIB)
            monitor.step()
        snapshots._on_oom(0, 2 * GIB, 24 * GIB, GIB)
        assert gpu.snapshots  # already here
        snapshots._on_oom(0, 2 * GIB, 24 * GIB, GIB)  # another in the same step
        raise oom()

    with pytest.raises(torch.OutOfMemoryError), monitor:
        train()
    path = tmp_path / "memlab-oom-step4.pickle"
    assert gpu.snapshots == [str(path)]
    assert capsys.readouterr().err == (
        "memlab: out of memory in step 4 on cuda:0\n"
        "  requested   2.00 GiB, with 1.00 GiB free of 24.00 GiB on the device\n"
        "  last step   peak 23.00 GiB, 3.00 GiB after it; the run's peak is 23.00 GiB\n"
        "  reserved    23.00 GiB, 0 B unused in the last step\n"
        "  growth      +2.00 GiB after the step, over the last 2 steps\n"
        f"  snapshot    {path}\n"
        f"Run `memlab explain {path}` to see what filled the memory.\n"
    )


def test_without_an_observer_the_snapshot_is_written_as_the_error_leaves(gpu, tmp_path, capsys):
    with pytest.raises(torch.OutOfMemoryError), memlab.monitor("cuda:0", snapshot_dir=tmp_path):
        raise oom()
    assert gpu.snapshots == [str(tmp_path / "memlab-oom-step1.pickle")]
    assert "No step has finished" in capsys.readouterr().err


def test_an_out_of_memory_error_of_another_device_is_ignored(gpu, tmp_path, capsys):
    monitor = memlab.monitor("cuda:0", snapshot_dir=tmp_path)
    snapshots._on_oom(1, 2 * GIB, 24 * GIB, GIB)
    assert (gpu.snapshots, capsys.readouterr().err) == ([], "")
    monitor.step()


def test_a_caught_error_leaves_room_for_the_snapshot_of_a_later_one(gpu, tmp_path, capsys):
    monitor = memlab.monitor("cuda:0", snapshot_dir=tmp_path)
    snapshots._on_oom(0, 2 * GIB, 24 * GIB, GIB)
    monitor.step()
    snapshots._on_oom(0, 2 * GIB, 24 * GIB, GIB)
    assert len(gpu.snapshots) == 2


def test_ranks_write_snapshots_of_different_names(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert snapshots.snapshot_path(tmp_path, "oom", 5).name == "memlab-oom-rank3-step5.pickle"


def test_a_snapshot_that_cannot_be_written_does_not_hide_the_error(gpu, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(torch.OutOfMemoryError),
        memlab.monitor("cuda:0", snapshot_dir=tmp_path / "file"),
    ):
        raise oom()
    assert "snapshot    failed (" in capsys.readouterr().err


@pytest.fixture
def explain(monkeypatch):
    """Put a Python program in the place of `memlab explain`."""

    def replace(program: str) -> None:
        monkeypatch.setitem(sys.modules, "memlab.explain", types.ModuleType("memlab.explain"))
        monkeypatch.setattr(snapshots, "EXPLAIN", (sys.executable, "-c", program))

    return replace


def test_the_explanation_is_printed_where_it_is_installed(gpu, tmp_path, capsys, explain):
    explain("import sys; print('explained', sys.argv[1])")
    with pytest.raises(torch.OutOfMemoryError), memlab.monitor("cuda:0", snapshot_dir=tmp_path):
        raise oom()
    assert capsys.readouterr().err.endswith(f"explained {tmp_path}/memlab-oom-step1.pickle\n")


def test_an_explanation_that_fails_names_the_command(gpu, tmp_path, capsys, explain):
    explain("1 / 0")
    with pytest.raises(torch.OutOfMemoryError), memlab.monitor("cuda:0", snapshot_dir=tmp_path):
        raise oom()
    assert capsys.readouterr().err.endswith("pickle` to see what filled the memory.\n")


def test_an_out_of_memory_error_of_the_cpu_is_explained_without_a_snapshot(capsys):
    monitor = memlab.monitor("cpu")
    monitor.step()
    with pytest.raises(RuntimeError), monitor:
        torch.empty(2**50)
    printed = capsys.readouterr().err
    assert "out of memory in step 2 on cpu" in printed
    assert "snapshot    " not in printed


def test_an_error_without_a_snapshot_gets_the_answer_to_its_text(capsys):
    monitor = memlab.monitor("cpu")
    with pytest.raises(RuntimeError), monitor:
        torch.empty(2**42)
    answer = capsys.readouterr().err.partition("cause: ")[2]
    assert answer.startswith("the computer's own memory (RAM) ran out")


def test_a_report_that_fails_does_not_replace_the_error(gpu, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: 1 / 0)
    with pytest.raises(torch.OutOfMemoryError), memlab.monitor("cuda:0"):
        raise oom()
    assert "memlab: no report (ZeroDivisionError" in capsys.readouterr().err


def test_another_error_prints_nothing(gpu, capsys):
    with pytest.raises(ZeroDivisionError), memlab.monitor("cuda:0"):
        1 / 0  # noqa: B018 - raising is the test
    assert capsys.readouterr().err == ""


def test_a_monitor_dies_with_its_last_reference():
    import gc
    import weakref

    monitor = memlab.monitor("cpu", every=3)
    monitor.step()
    reference = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert reference() is None


def test_warnings_can_be_ignored(gpu):
    monitor = memlab.monitor("cuda:0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeakWarning)
        leaking(gpu, monitor)
