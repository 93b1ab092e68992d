"""Other threads go on as without memlab while one measures, predicts or runs a script."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.request import urlopen

import pytest
import torch
import torch.nn.functional as F
from beside import another_thread
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memlab
from memlab.world.isolation import Isolation


@pytest.fixture
def elsewhere():
    with another_thread() as call:
        yield call


def training():
    """Return a small step, its model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 32)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model, optimizer


@contextmanager
def prediction():
    from memlab.prediction import PredictedRun

    with PredictedRun():
        yield


@contextmanager
def metering():
    with memlab.meter():
        yield


ACTIVE = [metering, memlab.dry_run, prediction]


# ------------------------------------------------------------------ what another thread sees


def uses_of_torch(path):
    """Use what memlab replaces, and return what comes out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 8, 8, generator=generator, requires_grad=True)
    layer = nn.Linear(8, 8)
    nn.init.ones_(layer.weight)
    torch.save({"x": x.detach()}, path)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x), x.exp(), F.softmax(x, -1), F.layer_norm(x, (8,))
    attention = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    attention.sum().backward()
    (batch,) = next(iter(DataLoader(TensorDataset(x.detach()), batch_size=1)))
    storage = torch.zeros(2).untyped_storage()
    storage.resize_(16)
    return {
        "saved": torch.equal(torch.load(path)["x"], x),
        "available": torch.cuda.is_available(),
        "accelerator": torch.accelerator.is_available(),
        "devices": torch.cuda.device_count(),
        "classes": (torch.Generator, torch.cuda.Stream, torch.cuda.Event),
        "fake": isinstance(x, torch._subclasses.FakeTensor),
        "types": [type(each) for each in (x, batch, attention, x.grad)],
        "autocast": [each.dtype for each in cast],
        "attention": attention.tolist(),
        "gradient": x.grad.tolist(),
        "norm": F.rms_norm(x, (8,)).tolist(),
        "batch": batch.tolist(),
        "scaler": torch.amp.GradScaler("cpu").is_enabled(),
        "resized": storage.nbytes(),
        "optimizer": torch.optim.AdamW(layer.parameters()).defaults["lr"],
    }


@pytest.mark.parametrize("active", ACTIVE)
def test_another_thread_uses_torch_as_before(active, elsewhere, tmp_path):
    path = tmp_path / "checkpoint.pt"
    before = uses_of_torch(path)
    path.unlink()
    with active():
        during = elsewhere(lambda: uses_of_torch(path))
    assert during == before
    assert uses_of_torch(path) == before


@pytest.mark.parametrize("active", ACTIVE)
def test_a_model_that_another_thread_compiles_runs_compiled_then_and_later(active, elsewhere):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x.sin().cos(), backend=backend)
    with active():
        elsewhere(lambda: compiled(torch.ones(2)))
    assert len(graphs) == 1
    compiled(torch.ones(2))
    assert len(graphs) == 1


def test_another_threads_files_are_written_while_a_script_is_isolated(elsewhere, tmp_path):
    isolation = Isolation()
    with isolation.active():
        (tmp_path / "script.txt").write_text("the script's")
        elsewhere(lambda: (tmp_path / "other.txt").write_text("another thread's"))
        thread = threading.Thread(target=(tmp_path / "thread.txt").write_text, args=("its own",))
        thread.start()
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]


def test_a_web_server_answers_as_before(tmp_path):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            torch.save(torch.ones(1), tmp_path / "saved.pt")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(str(torch.cuda.is_available()).encode())

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    answers = []

    def ask():
        with urlopen(f"http://127.0.0.1:{server.server_port}") as answer:
            answers.append(answer.read().decode())

    try:
        memlab.predict(lambda: (ask, None, None), steps=1)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert answers == [str(torch.cuda.is_available())]
    assert (tmp_path / "saved.pt").exists()


# ------------------------------------------------------------------ what the measurement sees


def events(trace):
    return [event._replace(storage=0) for event in trace.events]


def test_another_threads_work_is_in_no_trace(elsewhere):
    """A thread that prepares data with a model of its own, and trains it."""

    def measured(meanwhile):
        step, model, optimizer = training()
        step()

        def measured_step():
            elsewhere(meanwhile)
            step()
            elsewhere(meanwhile)

        return memlab.measure(measured_step, model=model, optimizer=optimizer)

    assert events(measured(lambda: training()[0]())) == events(measured(lambda: None))


def test_two_threads_measure_one_after_the_other():
    def measured():
        step, model, optimizer = training()
        step()
        return memlab.measure(step, model=model, optimizer=optimizer)

    alone = measured()
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            traces = [task.result() for task in [pool.submit(measured) for _ in range(2)]]
        assert [events(trace) for trace in traces] == [events(alone)] * 2
    assert torch.set_autocast_enabled.__name__ == "set_autocast_enabled"
    assert "<locals>" not in repr(torch.set_autocast_enabled)
    assert events(measured()) == events(alone)


def test_a_pools_tasks_work_for_the_thread_that_submits_them():
    with ThreadPoolExecutor(1) as before:
        before.submit(int).result()
        found = []

        def step():
            with ThreadPoolExecutor(1) as during:
                for pool in (before, during):
                    found.append(pool.submit(torch.cuda.is_available).result())

        memlab.predict(lambda: (step, None, None), steps=1)
        found.append(before.submit(torch.cuda.is_available).result())
    assert found == [True, True, torch.cuda.is_available()]


def test_a_thread_of_a_measured_step_cannot_measure_too():
    refused = []

    def measure():
        try:
            memlab.measure(lambda: torch.ones(1))
        except RuntimeError as error:
            refused.append(str(error))

    def step():
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()

    memlab.measure(step)
    assert len(refused) == 1
    assert refused[0].startswith("a measurement is running in the thread that this one works for;")
