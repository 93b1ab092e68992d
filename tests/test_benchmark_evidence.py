"""Tests of benchmarks/evidence.py: predictions beside other people's measurements."""

import json
from contextlib import ExitStack
from functools import cache

import pytest
from benchmark_scripts import script
from quick import quick, slow

evidence = script("evidence")
measurements = script("evidence_steps.measurements")
predictions = script("evidence_steps.predictions")
page = script("evidence_steps.page")
reasons = script("evidence_steps.reasons")
verdicts = script("evidence_steps.verdicts")

EXACT = (
    slow("SmolLM2-135M, sdpa, nf4, 1 × 4096"),
    slow("TinyLlama-1.1B-Chat-v1.0, eager, fp16, 2 × 512"),
    slow("TinyLlama-1.1B-Chat-v1.0, sdpa, fp16, 2 × 1024"),
    *map(slow, ("SmolLM2-135M, eager, fp16, 2 × 512", "SmolLM2-135M, sdpa, fp16, 2 × 512")),
)
CLOSE = (  # with the largest error of reserved memory
    ("distilgpt2, AdamW, batch 30, RTX 3060", 0.005),
    slow(("T5-small, Adam, batch 30, RTX 3060", 0.005)),
    slow(("MobileNetV2, AdamW, batch 415, RTX 4060", 0.02)),
    slow(("VGG16, AdamW, batch 560, RTX 3060", 0.02)),
    slow(("SmolLM2-135M, sdpa, nf4, 2 × 512", 0.005)),
    ("opt-125m, AdamW, batch 38, RTX 3060", 0.005),
    slow(("gpt-neo-125M, AdamW, batch 25, RTX 3060", 0.005)),
    slow(("ConvNeXtTiny, AdamW, batch 500, RTX 3060", 0.04)),
    slow(("distilgpt2, AdamW, batch 22, RTX 4060", 0.005)),
    slow(("VGG16, Adam, batch 543, RTX 3060", 0.005)),
    slow(("MnasNet, RMSprop, batch 600, RTX 3060", 0.04)),
    slow(("RegNetY400MF, SGD, batch 503, RTX 3060", 0.05)),
)

QUICK_ON_THE_H200 = (
    *("sdpa auto, causal, 64, bf16", "dropout after each branch, bf16", "autocast bf16"),
    *("autocast bf16, RMSNorm, dropout", "AdamW, foreach", "Adafactor", "inference mode"),
)
NEARLY = {  # bytes of reserved memory and the reason
    "sdpa math, causal, 64, float32": 2**21,  # one segment of attention's small scratch
    "grouped queries, auto, 64, float32": 2**21,
    "course's GPT, float32": 2**21,
    "memlab: lora": 2**22,
    "transformers' Llama, sdpa, bf16": 0,  # 66,048 bytes allocated
    "transformers' Llama, eager, float32": 0,
    "transformers' GPT-2, sdpa, float32": 0,
    "sdpa math, full, 128, bf16": 0,
    "memlab: loss-scaling": 0,
}


def on_the_h200():
    """Yield each step without convolutions, recurrent layers or compiled code."""
    for m in measurements.own_steps():
        if m.kind in ("own transformers", "own perceptron"):
            yield m.facts[1]["configuration"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick(QUICK_ON_THE_H200, on_the_h200()))
def test_a_step_on_an_h200_is_predicted_to_the_byte(name):
    [measured] = [m for m in measurements.own_steps() if m.facts[1]["configuration"] == name]
    row = predictions.predicted(measured)
    assert abs(row.reserved_bytes - measured.reserved_bytes) == NEARLY.get(name, 0)
    if name not in NEARLY:
        assert row.allocated_bytes == measured.allocated_bytes


@pytest.fixture(scope="module")
def predicted():
    """Predict a row by its name, in one process for each set of package versions."""
    by_name = {m.name: m for m in measurements.measurements()}
    with ExitStack() as stack:

        @cache
        def process(packages):
            return stack.enter_context(predictions.importing(packages, 1))

        @cache
        def predict(name):
            measurement = by_name[name]
            if predictions.missing_packages([measurement.packages]):
                pytest.skip("run make evidence first")
            return process(measurement.packages).submit(predictions.predicted, measurement).result()

        yield predict


@pytest.mark.parametrize("name", EXACT)
def test_a_lora_step_on_a_t4_is_predicted_to_the_byte(predicted, name):
    row = predicted(name)
    assert row.allocated_bytes == row.measurement.allocated_bytes
    assert row.reserved_bytes == row.measurement.reserved_bytes
    assert reasons.reason(row) == "exact"


@pytest.mark.parametrize(("name", "largest_error"), CLOSE)
def test_a_measured_training_is_predicted_closely(predicted, name, largest_error):
    assert abs(predicted(name).reserved_error) <= largest_error


@pytest.mark.slow
def test_a_four_bit_step_on_a_t4_is_allocated_within_two_thousandths(predicted):
    assert abs(predicted("SmolLM2-135M, sdpa, nf4, 2 × 512").allocated_error) < 2e-3


COMPILED = (  # with the largest error of allocated memory
    ("compiled, checkpointed, NVIDIA H200", 1e-3),
    ("compiled, large vocabulary, autocast bf16, NVIDIA H200", 1e-3),
    ("compiled residual network, channels last, autocast bf16, NVIDIA H200", 1e-2),
    ("compiled GPT, 8 layers of 512, micro-batches: 2, H100", 1e-4),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "largest_error"), COMPILED)
def test_a_compiled_step_is_predicted_as_the_measured_torch_compiles_it(
    predicted, name, largest_error
):
    assert abs(predicted(name).allocated_error) < largest_error


@pytest.mark.slow
def test_processes_import_the_measured_torch():
    if predictions.missing_packages(["torch"]):
        pytest.skip("run make evidence first")
    with predictions.importing("torch", 1) as processes:
        assert processes.submit(eval, "__import__('torch').__version__").result()[:4] == "2.11"


KERNELS = (
    "geglu, liger, backward, T = 1024, a100-80",
    slow("rope, huggingface, full, T = 1024, a100-80"),
    slow("layer_norm, liger, full, N = 4096, h100"),
    slow("jsd, torch, full, V = 4096, h100-pcie"),
    slow("group_norm, liger, full, C = 32, b200"),
)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_liger_is_predicted_to_the_byte_by_its_own_python_code(predicted, name):
    row = predicted(name)
    assert row.allocated_error == 0
    assert reasons.reason(row) == "exact"


# ------------------------------------------------------------------ summary


def a_row(
    kind, reserved, *, measured: float | None = 100.0, allocated=None, peers=None, unrecorded=""
):
    of = measurements.Measurement(
        "a step", "T4", kind, "a model", measured, allocated, peers or {}, "", unrecorded
    )
    return predictions.EvidenceRow(of, 100, reserved, None, ("a kernel",), 1.0)


def test_a_summary_has_the_spread_of_each_kind_figure_and_estimator():
    rows = [
        a_row("LoRA", 110, allocated=100),
        a_row("LoRA", 95, allocated=100, peers={"xMem": 150}),
        a_row("transformer", 200, unrecorded="lengths"),
        a_row("transformer", 101),
    ]
    found = page.summary(rows)
    assert found["LoRA, allocated"] == {"rows": 2, "median": 0, "95 %": 0, "worst": 0}
    assert found["LoRA, reserved"]["worst"] == pytest.approx(0.1)
    assert found["LoRA, xMem"]["worst"] == pytest.approx(0.5)
    assert found["transformer, reserved"]["worst"] == pytest.approx(0.01)
    assert found["transformer, reserved, all rows"]["worst"] == pytest.approx(1)


def test_rows_without_reserved_memory_have_no_error_of_it():
    rows = [a_row("compiled", 110, measured=None, allocated=100)]
    assert page.summary(rows) == {
        "compiled, allocated": {"rows": 1, "median": 0, "95 %": 0, "worst": 0}
    }
    assert "| a model | compiled | 1 | 0 | – | – |" in page.by_model_table(rows)
    assert page.library_errors([*rows, a_row("own compiled", 90)])["compiled code"] == {
        "allocated": {"rows": 1, "lowest": 0, "highest": 0},
        "reserved": {"rows": 1, "lowest": -0.1, "highest": 0},
    }


def test_rows_whose_reserved_memory_was_not_measured_are_summarized_by_allocated_memory():
    row = a_row("Liger kernel", 110, measured=None, allocated=80)
    assert page.summary([row]) == {
        "Liger kernel, allocated": {"rows": 1, "median": 0.25, "95 %": 0.25, "worst": 0.25}
    }
    assert "| a model | Liger kernel | 1 | 25.00% | – | – |" in page.by_model_table([row])
    assert row.error == 0.25


def test_the_95th_percentile_covers_19_of_20_rows():
    assert page.percentile_95(range(20)) == 18
    assert page.percentile_95([3.0]) == 3.0


def test_the_library_gets_the_errors_of_rows_whose_inputs_are_known():
    rows = [
        a_row("LoRA", 98, allocated=100),
        a_row("transformer", 104),
        a_row("transformer", 150, unrecorded="lengths"),
        a_row("QLoRA", 100),
        a_row("CNN", 90),
    ]
    found = page.library_errors(rows)
    assert found["transformers"] == {
        "allocated": {"rows": 1, "lowest": 0, "highest": 0},
        "reserved": {"rows": 2, "lowest": -0.02, "highest": 0.04},
    }
    assert found["convolutions"]["reserved"] == {"rows": 1, "lowest": -0.1, "highest": 0}
    assert "recurrent layers" not in found


def test_a_kernel_is_confirmed_by_a_row_within_a_percent():
    assert page.confirmed_kernels([a_row("LoRA", 102)]) == []
    assert page.confirmed_kernels([a_row("LoRA", 100)]) == ["a kernel"]
    assert page.confirmed_kernels([a_row("Liger kernel", 1, measured=None, allocated=80)]) == []
    assert page.confirmed_kernels([a_row("Liger kernel", 1, measured=None, allocated=100)])


# ------------------------------------------------------------------ rows and errors


def test_every_measured_row_is_read_with_its_peers():
    found = measurements.measurements()
    by_source = [m.source for m in found]
    assert by_source.count("T4") == 28
    assert by_source.count("xMem") == 72
    assert by_source.count("H100") == 5
    assert all(m.peers.keys() >= {"xMem", "DNNMem"} for m in found if m.source == "xMem")


def test_own_steps_are_written_and_read(tmp_path, monkeypatch):
    row = {"configuration": "no_grad", "allocated_bytes": 5, "reserved_bytes": 7, "other": 1}
    source = {"gpu": "GPU X", "target": "cuda", "small": True}
    measurements.put_own_steps(tmp_path, "gpu-x", source, [row])
    monkeypatch.setattr(measurements, "EVIDENCE", tmp_path)
    [own] = measurements.own_steps()
    assert (own.name, own.allocated_bytes, own.reserved_bytes) == ("no_grad, GPU X", 5, 7)
    assert predictions.predicted(own).reserved_bytes > 0


def test_a_file_of_own_steps_holds_only_what_was_measured(tmp_path):
    row = {"configuration": "no_grad", "allocated_bytes": 5, "reserved_bytes": 7, "other": 1}
    path = measurements.put_own_steps(tmp_path, "gpu-x", {"gpu": "GPU X"}, [row])
    measured = {"allocated_bytes": 5, "reserved_bytes": 7}
    wanted = [{"configuration": "no_grad", "measured": measured}]
    assert json.loads(path.read_text(encoding="utf-8"))["runs"] == wanted


def test_an_unknown_name_is_one_line(capsys):
    assert evidence.main(["--only", "GPT-9"]) == 2
    assert capsys.readouterr().err == "error: no row has 'GPT-9' in its name\n"


@pytest.mark.slow
def test_missing_packages_are_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(predictions, "PACKAGES", tmp_path)
    assert evidence.main(["--only", "T5-small"]) == 2
    assert "make evidence" in capsys.readouterr().err


# ------------------------------------------------------------------ verdicts


@pytest.mark.slow
def test_the_largest_batch_that_ran_is_not_refused_and_the_next_one_is():
    if predictions.missing_packages([verdicts.PACKAGES]):
        pytest.skip("run make evidence first")
    chosen = [each for each in verdicts.batches() if each[0] == "vit_base_patch16_224"]
    found = [(each.ran, each.verdict) for each in verdicts.verdicts(chosen)]
    assert found == [(True, "fits"), (False, "does not fit")]


def test_a_verdict_is_wrong_only_if_it_is_certain():
    wrong = {
        (ran, verdict): verdicts.Judged("a model", 8, ran, 1, 2, verdict).is_wrong
        for ran in (True, False)
        for verdict in ("fits", "may fit", "does not fit")
    }
    assert [case for case, is_wrong in wrong.items() if is_wrong] == [
        (True, "does not fit"),
        (False, "fits"),
    ]
    judged = [verdicts.Judged("a model", 8, ran, 2**30, 2**31, "fits") for ran in (True, False)]
    _, said, table = page.verdict_parts(judged)
    assert "Of 2 verdicts 1 are wrong; 0 say" in said
    assert "| a model | 8 | ran out | 1.00 GiB | 2.00 GiB | fits |" in table
