"""`memlab run`: what it prints for a script as it is."""

import json
import re
from pathlib import Path
from textwrap import dedent

import pytest

from memlab.cli.advice import _smaller_batch
from memlab.trace import Event, Trace
from memlab.units import WIDTH

TRAIN = """
    import argparse, os
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    os.makedirs("checkpoints", exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(100):
        x = torch.randn(arguments.batch_size, 512, device=device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", number, loss.item())
        torch.save(model.state_dict(), "checkpoints/model.pt")
    raise RuntimeError("not reached")
    """


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    return tmp_path


def test_a_script_that_fits_is_explained_by_layer_and_by_line(memlab_in, folder):
    outcome = memlab_in(folder, "run", "--gpu", "t4", "train.py", "--batch-size", "4096")
    assert outcome.status == 0
    assert outcome.out.startswith("train.py: step 2, predicted for cuda:t4")
    kept = "memlab kept the script from writing checkpoints and 1 more; --allow-writes permits it"
    assert kept in " ".join(outcome.out.split())
    assert ": it fits, " in outcome.out
    assert " ".join(outcome.out.split()).count("4 × activations *") == 1
    assert "train.py:17 <module>" in outcome.out  # loss.backward()
    assert max(map(len, outcome.out.splitlines())) <= WIDTH
    assert outcome.err.count("memlab: step") == 2
    assert "step 1 " not in outcome.out
    assert sorted(path.name for path in folder.iterdir()) == ["train.py", "work"]
    assert {path.suffix for path in (folder / "work").iterdir()} <= {".json", ".png", ".txt"}
    refused = (folder / "work" / "run-refused.txt").read_text()
    assert refused == "write    checkpoints\nwrite    checkpoints/model.pt\n"


def test_a_script_that_does_not_fit_has_status_1(memlab_in, folder):
    outcome = memlab_in(folder, "run", "--memory", "700MiB", "train.py", "--batch-size", "65536")
    assert outcome.status == 1
    assert ": it does not fit, " in outcome.out


def test_a_verdict_within_the_error_of_its_kind_is_doubted(memlab_in, folder):
    """Measured convolutions reserved far more than their prediction, as with cudnn.benchmark."""
    step = """
        import torch
        layer = torch.nn.Conv2d(3, 8, 3).cuda()
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(2):
            layer(torch.zeros(32, 3, 256, 256, device="cuda")).sum().backward()
            optimizer.step()
        """
    (folder / "convolution.py").write_text(dedent(step))
    found = {}
    for memory in ("1GiB", "40GiB"):
        command = ("run", "--memory", memory, "--device", "cuda", "--margin", "0%")
        found[memory] = " ".join(memlab_in(folder, *command, "convolution.py").out.split())
    said = ": it fits, "
    assert said in found["40GiB"]
    assert "but it may not" not in found["40GiB"]
    assert said in found["1GiB"]
    assert (
        "but it may not: of measured steps of this kind (convolutions) one reserved"
        in (found["1GiB"])
    )


def test_the_document_has_the_peak(memlab_in, folder, schema):
    outcome = memlab_in(folder, "run", "--json", "--device", "cpu", "train.py")
    document = json.loads(outcome.out)
    weights = 4 * 4 * (512 * 512 + 512)
    assert (document["command"], document["verdict"]) == ("run", "measured")
    assert document["rows"][0]["at_peak"]["parameters"] == weights
    schema.validate(document)


def test_the_documents_verdict_is_the_exit_status(memlab_in, folder, schema):
    for batch, status, verdict in (("64", 0, "fits"), ("65536", 1, "does not fit")):
        words = ("--json", "--no-advice", "--memory", "700MiB", "train.py", "--batch-size", batch)
        outcome = memlab_in(folder, "run", *words)
        document = json.loads(outcome.out)
        schema.validate(document)
        assert (outcome.status, document["verdict"]) == (status, verdict)


def test_a_real_run_computes(memlab_in, folder):
    real = memlab_in(folder, "run", "--real", "train.py")
    dry = memlab_in(folder, "run", "--device", "cpu", "train.py")
    assert "step 2, measured on this machine" in real.out
    [measured], [predicted] = (
        [line.split("(")[0] for line in out.splitlines() if line.startswith("peak ")]
        for out in (real.out, dry.out)
    )
    assert measured == predicted
    assert not (folder / "checkpoints").exists()


def test_written_files_stay_if_they_are_allowed(memlab_in, folder):
    memlab_in(folder, "run", "--real", "--allow-writes", "train.py")
    assert (folder / "checkpoints" / "model.pt").exists()


def test_a_script_that_ends_early_is_measured_from_its_start(memlab_in, folder):
    source = (folder / "train.py").read_text().replace("range(100)", "range(1)")
    (folder / "train.py").write_text(source.replace('raise RuntimeError("not reached")', ""))
    outcome = memlab_in(folder, "run", "train.py")
    assert outcome.status == 0
    assert outcome.out.startswith("train.py: step 1 (its only one), predicted for cuda")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("1 / 0", "train.py:1 raised ZeroDivisionError: division by zero"),
        ("def f(:", "train.py:1 raised SyntaxError"),
        ("import sys; sys.exit(3)", "train.py:1 raised SystemExit: 3"),
        ("print('hello')", "train.py ended without a training step"),
        ("import torch; torch.save({}, 'a/b.pt')", "train.py"),
    ],
)
def test_a_script_that_cannot_train_is_one_sentence(memlab_in, tmp_path, source, complaint):
    (tmp_path / "train.py").write_text(source)
    outcome = memlab_in(tmp_path, "run", "train.py")
    assert outcome.status == 2
    [started, unconfined, line] = [
        line for line in outcome.err.splitlines() if line.startswith("memlab: ")
    ]
    assert started == "memlab: running train.py until step 2 has ended"
    assert "(memlab runs inside another program)" in unconfined
    assert complaint in line
    assert "Traceback" not in outcome.err
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["train.py"]


def test_a_module_has_its_own_options(memlab_in, folder):
    """Also options with memlab's names, such as --gpus."""
    script = folder / "train.py"
    script.write_text(script.read_text().replace('"--batch-size"', '"--batch-size", "--gpus"'))
    outcome = memlab_in(folder, "run", "--device", "cpu", "-m", "train", "--gpus", "4")
    assert outcome.status == 0
    assert outcome.out.startswith("-m train: step 2")


def test_the_header_says_which_rank_ran(memlab_in, folder):
    outcome = memlab_in(folder, "run", "torchrun", "--nproc-per-node", "2", "train.py")
    assert outcome.out.startswith("train.py: step 2 of rank 0 of 2, predicted for cuda")
    for words in (("--real",), ("--device", "cpu")):
        refused = memlab_in(folder, "run", "--gpus", "2", *words, "train.py")
        assert refused.err.startswith("memlab: got --gpus without a prediction for a GPU")


def test_a_slow_script_says_where_it_is(memlab_in, folder, monkeypatch):
    """The signal comes from the script itself, so that the result hangs on no clock."""
    script = folder / "train.py"
    script.write_text("import signal\nsignal.raise_signal(signal.SIGALRM)\n" + script.read_text())
    outcome = memlab_in(folder, "run", "--device", "cpu", "train.py")
    assert outcome.err.startswith("memlab: running train.py until step 2 has ended\n")
    assert "\nmemlab: train.py:2 after " in outcome.err


def test_sigterm_ends_it_as_ctrl_c_does(memlab_in, folder):
    (folder / "train.py").write_text("import signal; signal.raise_signal(signal.SIGTERM)")
    outcome = memlab_in(folder, "run", "train.py")
    assert outcome.status == 130
    assert "interrupted; nothing was written" in outcome.err


def test_a_pools_workers_have_the_scripts_handlers_of_signals(memlab_in, folder):
    pool = """
        import multiprocessing, signal

        signals = signal.SIGALRM, signal.SIGTERM
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print("in a worker:", *pool.map(signal.getsignal, signals))
    """
    script = folder / "train.py"
    script.write_text(dedent(pool) + script.read_text())
    outcome = memlab_in(folder, "run", "--device", "cpu", "train.py")
    assert "\nin a worker: 0 0\n" in outcome.err  # the default handlers


def test_an_error_names_what_was_refused(memlab_in, folder):
    (folder / "train.py").write_text("import os\nos.system('git log > log')\nopen('log')\n")
    outcome = memlab_in(folder, "run", "train.py")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1] == (
        "memlab: train.py:3 raised FileNotFoundError: [Errno 2] No such file or directory: 'log'; "
        "the script asked for the program git, and was refused; if that makes the missing file, "
        "pass --allow-writes"
    )


def test_the_document_has_each_change(memlab_in, folder, schema):
    outcome = memlab_in(folder, "run", "--json", "--advise", "train.py", "--batch-size", "4096")
    document = json.loads(outcome.out)
    schema.validate(document)
    plain, *changed = document["rows"]
    assert plain["technique"] == "train.py"
    assert all(row["technique"].startswith("with ") for row in changed)
    assert min(row["peak_bytes"] for row in changed) < plain["peak_bytes"]


PARALLEL = Path(__file__).parents[2] / "benchmarks" / "parallel"


def test_the_stages_of_a_pipeline_have_a_row_each(memlab_in, tmp_path):
    words = ("run", "--device", "cpu", "--ranks", "3", str(PARALLEL / "one_f_one_b.py"))
    outcome = memlab_in(tmp_path, *words)
    rows = [
        line.split()[0] for line in outcome.out.splitlines() if re.match(r"\d +[\d.]+ MiB", line)
    ]
    assert (outcome.status, rows) == (0, ["0", "1", "2"])
    assert "the highest:" in outcome.out
    assert re.search(r"KiB +\d+ × send to one rank, within a node", outcome.out)


def test_one_rank_of_many_sends_what_a_ring_sends(memlab_in, tmp_path):
    script = tmp_path / "train.py"
    source = (PARALLEL / "fsdp2.py").read_text()
    script.write_text(
        source.replace('"cpu"', '"cuda"').replace("256)).sq", '256, device="cuda")).sq')
    )
    words = ("run", "--gpu", "h100", "--ranks", "16", "--rank", "9", "train.py")
    outcome = memlab_in(tmp_path, *words)
    assert outcome.out.startswith("train.py: step 2 of rank 9 of 16, predicted for cuda:h100")
    text = " ".join(outcome.out.split())
    assert re.search(r"8 × all-gather of 16 ranks, between nodes", text)
    assert "by formula 24.00 MiB (2 channels) to 384.00 MiB (32)" in text


def test_several_ranks_are_chosen(memlab_in, tmp_path):
    (tmp_path / "train.py").write_text((PARALLEL / "ddp.py").read_text())
    words = ("run", "--device", "cpu", "--ranks", "8", "--rank", "2,5,2", "train.py")
    outcome = memlab_in(tmp_path, *words)
    rows = re.findall(r"^(\d)  +\d", outcome.out, re.MULTILINE)
    assert (outcome.status, rows) == (0, ["2", "5"])
    refused = memlab_in(tmp_path, "run", "--ranks", "8", "--rank", "2,x", "train.py")
    assert refused.err.startswith("memlab: got --rank x; expected an integer from 0")


def test_ranks_that_are_not_there_are_refused(memlab_in, folder):
    for words, complaint in (
        (("--rank", "2", "--ranks", "2", "train.py"), "got --rank 2 of 2; ranks count from 0"),
        (("--rank", "0,7", "--ranks", "2", "train.py"), "got --rank 7 of 2"),
        (("--ranks", "2", "torchrun", "train.py"), "got --ranks with a launcher"),
        (("--real", "--ranks", "2", "train.py"), "got --real with several ranks"),
        (("CUDA_VISIBLE_DEVICES=", "train.py"), "got CUDA_VISIBLE_DEVICES without a GPU"),
    ):
        outcome = memlab_in(folder, "run", *words)
        assert (outcome.status, outcome.out) == (2, "")
        assert outcome.err.startswith(f"memlab: {complaint}")


def test_the_share_of_the_batch_that_fits_leaves_weights_as_they_are():
    sizes = {"parameters": 100, "activations": 200}  # MiB
    events = [
        Event(size * 2**20, number, category, "", "", "forward", "float32", ())
        for number, (category, size) in enumerate(sizes.items())
    ]
    traces, needed = {"as it is": Trace(tuple(events))}, {"as it is": 300 * 2**20}
    share = _smaller_batch(traces, needed, 200 * 2**20)
    assert share.startswith("as it is, about 50 % of this batch fits")
    for budget in (300 * 2**20, 100 * 2**20, None):  # enough, too little for the weights, unknown
        assert _smaller_batch(traces, needed, budget).startswith("a smaller batch shrinks")


ATTENTION = """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    weight = torch.nn.Linear(64, 64).cuda().bfloat16()
    optimizer = torch.optim.SGD(weight.parameters())
    for _ in range(2):
        heads = weight(torch.randn(1, 8, 1024, 64, device="cuda").bfloat16())
        scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
        optimizer.step()
    """


def test_scores_of_math_attention_are_named(memlab_in, tmp_path):
    """A T4 has no fused kernel for bfloat16."""
    (tmp_path / "attend.py").write_text(dedent(ATTENTION))
    sentence = "32.00 MiB of these are attention scores"
    for device, is_named in (("cuda:t4", True), ("cuda", False)):
        outcome = memlab_in(tmp_path, "run", "--device", device, "attend.py")
        assert (sentence in outcome.out) is is_named


EVALUATED = """
    import torch

    model = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for number in range(3):
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        if number == 0:
            model.eval()
            with torch.set_grad_enabled(GRADIENTS):
                loss = model(torch.randn(65536, 512, device="cuda")).sum()
            model.train()
            del loss
    """


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("gradients", "remedy"), [("True", "torch.no_grad() around it"), ("False", "batch to the CPU")]
)
def test_a_peak_in_an_evaluation_is_named(memlab_in, tmp_path, gradients, remedy):
    (tmp_path / "train.py").write_text(dedent(EVALUATED.replace("GRADIENTS", gradients)))
    said = " ".join(memlab_in(tmp_path, "run", "train.py").out.split())
    assert "the peak is in an evaluation: Linear was in evaluation mode" in said
    assert remedy in said
    later = memlab_in(tmp_path, "run", "--steps", "3", "train.py").out
    assert "before this step, an evaluation had a higher peak, 275.2" in " ".join(later.split())
    first = memlab_in(tmp_path, "run", "--steps", "1", "train.py").out
    assert "evaluation mode" not in first


FRAGMENTED = """
    import torch
    weight = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(weight.parameters())
    for _ in range(2):
        for mib in (30, 40, 50):
            kept = torch.empty(mib * 2**18, device="cuda")
            del kept
        weight(torch.randn(4, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """


def test_a_need_below_the_reserved_peak_is_explained(memlab_in, tmp_path):
    (tmp_path / "train.py").write_text(dedent(FRAGMENTED))
    outcome = memlab_in(tmp_path, "run", "--no-advice", "--memory", "700MiB", "train.py")
    assert re.search(r"it needs 10\d\.\d+ MiB: it does not fit", outcome.out)
    assert "reserved peak 122.00 MiB" in outcome.out
    assert "less than the reserved peak below" in " ".join(outcome.out.split())
