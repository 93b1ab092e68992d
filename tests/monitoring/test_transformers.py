"""The callback of transformers' Trainer, in a real training of a tiny model."""

import gc
import weakref

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import memlab  # noqa: E402 - after the skips
from memlab.monitoring.transformers import MemoryCallback  # noqa: E402

NAMES = ("memory/peak_allocated", "memory/growth")  # the CPU has no reserved memory
MIB = 2**20


class Reporter(transformers.TrainerCallback):
    """What a service such as TensorBoard sees."""

    def __init__(self) -> None:
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append(dict(logs))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x) - labels).square().mean()}


@pytest.fixture
def trainer_of(tmp_path):
    def make(*callbacks, **settings) -> transformers.Trainer:
        data = [{"x": torch.ones(8), "labels": torch.zeros(8)} for _ in range(64)]
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            max_steps=6,
            logging_steps=2,
            per_device_train_batch_size=4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **settings,
        )
        return transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[*callbacks])

    return make


def test_each_log_has_the_memory_of_the_steps_since_the_one_before(trainer_of, capsys):
    callback = MemoryCallback()
    trainer = trainer_of(callback)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert all(row[name] is not None for row in rows for name in NAMES)
    assert callback.monitor.num_steps == 6
    assert "memory/peak_allocated" in capsys.readouterr().out  # the Trainer's own line


def test_services_that_are_called_before_the_callback_get_the_memory_too(trainer_of):
    reporter = Reporter()
    trainer_of(reporter, MemoryCallback()).train()
    assert [NAMES[0] in row for row in reporter.rows if "loss" in row] == [True] * 3


def test_the_summary_at_the_end_stays_as_it_is(trainer_of):
    trainer = trainer_of(MemoryCallback())
    trainer.train()
    assert NAMES[0] not in trainer.state.log_history[-1]


def test_accumulated_batches_are_one_step(trainer_of):
    callback = MemoryCallback()
    trainer_of(callback, gradient_accumulation_steps=3).train()
    assert callback.monitor.num_steps == 6


def test_a_monitor_around_the_training_goes_on_after_it(trainer_of, capsys):
    callback = MemoryCallback(memlab.monitor(every=3))
    with callback.monitor:
        trainer_of(callback).train()
        assert callback.monitor.is_running
    printed = capsys.readouterr().out
    assert printed.count("growth") == 2 + 3  # the monitor's lines, and the Trainer's
    assert printed.count("6 steps on cpu: peak") == 1


def test_a_training_can_be_taken_up_again(trainer_of):
    callback = MemoryCallback()
    trainer = trainer_of(callback)
    trainer.train()
    trainer.train()
    assert callback.monitor.num_steps == 12


class Failing(torch.utils.data.Dataset):
    """Raises an out-of-memory error when a sample is read for the `fails_at`-th time."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at, self.reads = fails_at, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict:
        self.reads += 1
        if self.reads == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return {"x": torch.ones(8), "labels": torch.zeros(8)}


def hooks() -> int:
    """Return how many monitors see the optimizers' steps."""
    return len(_global_optimizer_post_hooks)


def test_an_out_of_memory_error_that_leaves_train_is_reported_once(trainer_of, capsys):
    callback, before = MemoryCallback(), hooks()
    trainer = trainer_of(callback)
    trainer.train_dataset = Failing(fails_at=14)  # of the fourth batch, read during the third step
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert capsys.readouterr().err.count("memlab: out of memory in step 3") == 1
    assert not callback.monitor.is_running
    assert hooks() == before


def test_a_training_that_is_tried_again_with_half_the_batch_leaves_no_monitor_running(trainer_of):
    callback, before = MemoryCallback(), hooks()
    trainer = trainer_of(callback, auto_find_batch_size=True)
    trainer.train_dataset = Failing(fails_at=14)
    trainer.train()
    assert not callback.monitor.is_running
    assert hooks() == before


def test_the_trainer_is_freed_with_its_last_reference(trainer_of):
    """Its weights must not wait for the garbage collector."""
    trainer = trainer_of(MemoryCallback())
    trainer.train()
    gc.collect()
    gc.disable()
    try:
        model = weakref.ref(trainer.model)
        del trainer
        assert model() is None
    finally:
        gc.enable()


def test_another_error_stops_the_monitor_without_a_report(trainer_of, capsys):
    callback = MemoryCallback()
    trainer = trainer_of(callback)
    trainer.train_dataset = None
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()
    assert "out of memory" not in capsys.readouterr().err
    assert not callback.monitor.is_running
