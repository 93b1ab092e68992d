"""Scripts run as they are; their second step has the bytes of the real one."""

import gc
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from memlab.scripts.changes import Change
from memlab.scripts.launch import launch_of
from memlab.scripts.running import run
from memlab.scripts.steps import StepWatcher
from tests.quick import quick

SCRIPTS = {
    "an optimizer": """
        import torch
        from torch import nn
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
        """,
    "a main function": """
        import argparse, torch

        def main():
            parser = argparse.ArgumentParser()
            parser.add_argument("--batch-size", type=int, default=2)
            B = parser.parse_args().batch_size
            model = torch.nn.Linear(64, 64)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(B, 64)).sum().backward()
                optimizer.step()
                scheduler.step()

        if __name__ == "__main__":
            main()
        """,
    "two optimizers": """
        import torch
        D, G = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        for_D, for_G = (torch.optim.Adam(each.parameters()) for each in (D, G))
        for _ in range(5):
            for_D.zero_grad()
            D(G(torch.randn(32, 64)).detach()).mean().backward()
            for_D.step()
            for_G.zero_grad()
            D(G(torch.randn(32, 64))).mean().backward()
            for_G.step()
        """,
    "weights updated by hand": """
        import torch
        model = torch.nn.Linear(64, 64)
        for _ in range(5):
            model.zero_grad()
            model(torch.randn(32, 64)).sum().backward()
            for weight in model.parameters():
                weight.data.add_(weight.grad, alpha=-0.1)
        """,
    "accumulated gradients": """
        import torch
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(20):
            model(torch.randn(32, 64)).sum().backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        """,
    "a closure": """
        import torch
        model = torch.nn.Linear(64, 512)
        optimizer = torch.optim.AdamW(model.parameters())

        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(128, 64)).square().sum()
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)
        """,
    "what an earlier step leaves alive": """
        import torch
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for _ in range(5):
            loss = model(torch.randn(32, 64)).square().sum()
            losses.append(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
}
MAIN_WORDS = {"a main function": ["--batch-size", "32"]}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(source, name="train.py"):
        Path(name).write_text(dedent(source))
        return name

    return write


def outcome(words, **settings):
    return run(launch_of(words), **settings)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_dry_step_has_the_bytes_of_the_real_one(script, name):
    words = [script(SCRIPTS[name]), *MAIN_WORDS.get(name, [])]
    real = outcome(words, real=True)
    dry = outcome(words, device="cpu")
    assert dry.trace.peak_bytes == real.trace.peak_bytes > 0
    assert dry.trace.at_peak == real.trace.at_peak
    assert dry.steps == real.steps == 2


def test_the_second_step_is_the_one_of_memlab_measure(script):
    """The window from one step's end to the next has what a call of the step has."""
    found = outcome([script(SCRIPTS["an optimizer"])], device="cpu").trace
    weights = 4 * (64 * 256 + 256 + 256 * 8 + 8)
    assert found.at_peak["parameters"] == weights
    assert found.at_peak["optimizer_state"] == 2 * weights + 4 * 4  # and step counters


def test_a_closures_activations_are_activations(script):
    found = outcome([script(SCRIPTS["a closure"])], device="cpu").trace
    assert max(event.bytes for event in found.events if event.category == "activations") == (
        4 * 128 * 512
    )


def test_the_script_stops_after_its_second_step(script):
    source = SCRIPTS["an optimizer"] + '\n        raise SystemExit("not reached")\n'
    words = [script(source.replace("range(5)", "iter(lambda: print('loop'), 1)"))]
    assert outcome(words, device="cpu").steps == 2


def test_a_script_that_catches_exceptions_stops_too(script):
    source = """
        import torch
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            try:
                model(torch.randn(2, 8)).sum().backward()
                optimizer.step()
            except Exception:
                pass
        """
    assert outcome([script(source)], device="cpu").steps == 2


def test_what_fails_after_the_last_step_does_not_matter(script):
    source = """
        import torch
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        try:
            for _ in range(5):
                model(torch.randn(2, 8)).sum().backward()
                optimizer.step()
        finally:
            raise RuntimeError("while saving")
        """
    assert outcome([script(source)], device="cpu").trace is not None


def test_a_script_that_ends_early_has_no_trace(script):
    words = [script(SCRIPTS["an optimizer"].replace("range(5)", "range(1)"))]
    early = outcome(words, device="cpu")
    assert (early.trace, early.steps) == (None, 1)
    only = outcome(words, device="cpu", steps=1).trace
    weights = 4 * (64 * 256 + 256 + 256 * 8 + 8)
    assert only.at_peak["optimizer_state"] == 2 * weights + 4 * 4


def test_a_script_without_training_takes_no_step(script):
    found = outcome([script("import torch; torch.nn.Linear(8, 8)(torch.zeros(2, 8))")])
    assert (found.trace, found.steps, found.backwards) == (None, 0, 0)


def test_models_and_optimizers_are_found(script):
    found = outcome([script(SCRIPTS["two optimizers"])], device="cpu")
    assert [type(model).__name__ for model in found.models] == ["Linear", "Linear"]
    assert [type(optimizer).__name__ for optimizer in found.optimizers] == ["Adam", "Adam"]


def test_a_module_runs_as_python_runs_it(script, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "parts.py").write_text("SIZE = 64\n")
    source = "from .parts import SIZE\n" + dedent(SCRIPTS["an optimizer"])
    (tmp_path / "package" / "train.py").write_text(source)
    assert outcome(["-m", "package.train"], device="cpu").steps == 2
    assert "package.parts" not in sys.modules


def test_a_change_of_one_run_is_gone_in_the_next(script, tmp_path):
    """A module of the script may make the model when it is imported."""
    (tmp_path / "net.py").write_text("import torch\nmodel = torch.nn.Linear(64, 64)\n")
    source = """
        import torch
        from net import model
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            data = torch.randn(32, 64)
            model(data.to(model.weight.dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    words = [script(source)]
    plain = outcome(words, device="cpu").trace
    doubled = Change("float64", lambda model, _: model.double(), {})
    changed = outcome(words, device="cpu", change=doubled).trace
    assert changed.at_peak["parameters"] == 2 * plain.at_peak["parameters"]
    assert outcome(words, device="cpu").trace.at_peak == plain.at_peak


def test_what_a_script_sets_in_torch_is_gone_in_the_next_run(script):
    source = """
        import torch
        model = torch.nn.Linear(64, 64)
        assert torch.is_grad_enabled()
        assert model.weight.dtype == torch.float32 and model.weight.device.type == "cpu"
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("cuda")
        torch.set_grad_enabled(False)
        """
    for _ in range(2):
        outcome([script(source)])
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"
    assert torch.is_grad_enabled()


def test_the_command_line_is_the_scripts_own(script):
    before = sys.argv, sys.path[:]
    small, large = (
        outcome([script(SCRIPTS["a main function"]), "--batch-size", size], device="cpu")
        for size in ("2", "512")
    )
    assert large.trace.at_peak["inputs"] == 256 * small.trace.at_peak["inputs"]
    assert (sys.argv, sys.path) == before


def test_a_script_finds_the_gpu_that_it_is_predicted_for(script):
    source = """
        import torch
        device = "cuda" if torch.cuda.is_available() else "cpu"
        assert torch.cuda.get_device_properties(0).total_memory < 17 * 2**30
        model = torch.nn.DataParallel(torch.nn.Linear(64, 64)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        for x in torch.utils.data.DataLoader(torch.randn(256, 64), 64):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        """
    found = outcome([script(source)], device="cuda:t4").trace
    assert found.device == "cuda"
    assert found.at_peak["optimizer_state"] == 2 * found.at_peak["parameters"] == 8 * (64 * 65)


def test_a_launcher_of_two_ranks_runs_rank_0(script):
    source = """
        import os, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("nccl")
        assert (dist.get_rank(), dist.get_world_size()) == (0, 2)
        model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(32, 64, device="cuda")).sum().backward()
            optimizer.step()
        """
    found = outcome(["torchrun", "--nproc_per_node=2", script(source)])
    assert found.steps == 2
    assert not torch.distributed.is_initialized()


def test_an_error_of_the_script_is_raised(script):
    with pytest.raises(ZeroDivisionError):
        outcome([script("1 / 0")])
    with pytest.raises(SystemExit):
        outcome([script("raise SystemExit('wrong arguments')")])


@pytest.mark.parametrize("steps", quick([3], [1, 3, 4]))
def test_the_wanted_step_is_measured(script, steps):
    """Each step keeps one more loss."""
    words = [script(SCRIPTS["what an earlier step leaves alive"])]
    found = outcome(words, device="cpu", steps=steps)
    kept = [
        event
        for event in found.trace.alive()
        if event.shape == () and event.category != "optimizer_state"
    ]
    assert found.steps == steps
    assert len(kept) >= steps


def test_data_parallel_has_its_share_of_the_batch(script):
    source = """
        import torch
        from torch import nn
        layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 2))
        model = nn.DataParallel(layers).cuda()
        assert model.device_ids == list(range(torch.cuda.device_count()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            outputs = model(torch.randn(1024, 64))
            assert outputs.shape == (1024, 2) and outputs.device.type == "cuda"
            outputs.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    words = [script(source)]
    for gpus, rows in ((1, 1024), (4, 256)):
        found = outcome(words, gpus=gpus).trace
        kept = [e.bytes for e in found.events if e.category == "activations" and e.bytes > 0]
        assert max(kept) == 4 * rows * 512


def test_ddp_moves_its_inputs_if_it_has_device_ids(script):
    source = """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("nccl")
        model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[0])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(32, 64)).sum().backward()
            optimizer.step()
        """
    assert outcome(["torchrun", script(source)]).steps == 2


def test_ddp_can_be_measured_without_other_ranks(script):
    source = """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo", rank=0, world_size=2)
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            model(torch.randn(32, 64)).sum().backward()
            optimizer.step()
        """
    words = [script(source)]
    real, dry = outcome(words, real=True), outcome(words, device="cpu")
    assert real.trace.peak_bytes == dry.trace.peak_bytes


def test_the_scripts_path_is_absolute(script, tmp_path):
    source = """
        import os
        os.makedirs("out")
        os.chdir("out")
        assert os.path.dirname(os.path.abspath(__file__)) != os.getcwd()
        assert os.path.isfile(__file__)
        """
    assert outcome([script(source)]).steps == 0


@pytest.mark.slow
def test_a_backward_before_the_model_is_made_leaves_the_reserved_bytes(script):
    """It counts as a step until the script makes an optimizer; then the steps begin again."""
    warm_up = "import torch; torch.empty(1, device='cuda', requires_grad=True).backward()\n"
    training = dedent("""
        import torch
        from torch import nn
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            x = torch.randn(4096, 1024, device="cuda")
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """)
    plain, warm = (outcome([script(text)]).trace for text in (training, warm_up + training))
    assert plain.reserved_bytes == warm.reserved_bytes == 482 * 2**20
    assert plain.allocated_bytes == warm.allocated_bytes
    first, warm_first = (
        outcome([script(text)], steps=1).trace for text in (training, warm_up + training)
    )
    assert first.reserved_bytes == warm_first.reserved_bytes > 400 * 2**20


def test_an_optimizer_steps_on_when_what_watched_it_is_gone():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    watcher = StepWatcher(3, on_begin=lambda in_step: None, on_end=lambda: None)
    with watcher.watching():
        weight.sum().backward()
        optimizer.step()
    del watcher
    gc.collect()
    optimizer.step()
    assert weight.item() == 0.5
