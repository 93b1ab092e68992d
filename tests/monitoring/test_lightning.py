"""The callback of Lightning's Trainer, with a stand-in for it, and with Lightning where it is."""

import importlib
import sys
import types
from typing import Any

import pytest
import torch

NAMES = ["memory/peak_allocated", "memory/growth"]


class Logger:
    def __init__(self) -> None:
        self.rows: list[tuple[int, list[str]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, list(metrics)))


class Trainer:
    """The attributes and calls of Lightning's Trainer that the callback depends on."""

    log_every_n_steps = 2

    def __init__(self) -> None:
        self.global_step = 0
        self.loggers = [Logger(), Logger()]

    def fit(self, callback: Any, optimizer: Any, batches: int, accumulate: int = 1) -> None:
        callback.on_train_start(self, None)
        for number in range(batches):
            if number % accumulate == accumulate - 1:
                optimizer.step()
                self.global_step += 1
            callback.on_train_batch_end(self, None, None, None, number)
        callback.on_train_end(self, None)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def module(request, monkeypatch):
    """The callback's module, with a stand-in for one of Lightning's two packages."""
    stand_in = types.ModuleType(request.param)
    stand_in.Callback = type("Callback", (), {})
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, request.param, stand_in)
    monkeypatch.delitem(sys.modules, "memlab.monitoring.lightning", raising=False)
    yield importlib.import_module("memlab.monitoring.lightning")
    sys.modules.pop("memlab.monitoring.lightning", None)


@pytest.fixture
def optimizer():
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters())


def test_each_logger_gets_the_memory_every_so_many_steps(module, optimizer):
    trainer, callback = Trainer(), module.MemoryCallback()
    trainer.fit(callback, optimizer, batches=5)
    assert [logger.rows for logger in trainer.loggers] == [[(2, NAMES), (4, NAMES)]] * 2
    assert callback.monitor.num_steps == 5


def test_accumulated_batches_are_one_step(module, optimizer):
    trainer, callback = Trainer(), module.MemoryCallback()
    trainer.fit(callback, optimizer, batches=12, accumulate=3)
    assert callback.monitor.num_steps == 4
    assert trainer.loggers[0].rows == [(2, NAMES), (4, NAMES)]


def test_an_out_of_memory_error_is_explained(module, optimizer, capsys):
    callback = module.MemoryCallback()
    callback.on_train_start(Trainer(), None)
    callback.on_exception(Trainer(), None, MemoryError())
    assert "memlab: out of memory in step 1" in capsys.readouterr().err
    assert not callback.monitor.is_running


def test_a_monitor_around_the_training_reports_the_error_itself(module, capsys):
    callback = module.MemoryCallback()

    def fit() -> None:
        callback.on_train_start(Trainer(), None)
        callback.on_exception(Trainer(), None, MemoryError())
        raise MemoryError

    with pytest.raises(MemoryError), callback.monitor:
        fit()
    assert capsys.readouterr().err.count("memlab: out of memory") == 1


def test_lightning_itself_calls_it(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from memlab.monitoring.lightning import MemoryCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    callback = MemoryCallback()
    trainer = lightning.Trainer(
        max_steps=5,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(20, 4), batch_size=2))
    assert callback.monitor.num_steps == 5
