"""Tests of benchmarks/planner.py: measurements, and estimators against their sources."""

import importlib
import json
import warnings
from dataclasses import replace

import pytest
from benchmark_scripts import script

from memlab.model import GPTConfig
from memlab.trace import Event, Trace
from memlab.train import Setting, build, combined, measured

pytestmark = pytest.mark.slow  # runs a whole script at a small size


benchmark = script("planner")

Case = benchmark.PlannerCase
# s·b·h = 16·2·8 = 256, a·s/h = 4, v/h = 12.5, L = 3.
INPUTS = benchmark.EstimatorInputs(
    GPTConfig(
        vocab_size=100,
        hidden_size=8,
        layers=3,
        heads=2,
        kv_heads=2,
        intermediate_size=16,
        seq_len=32,
    ),
    weights=1000,
    trained=100,
    largest_layer=300,
    weight_bytes=2,
    gradient_bytes=2,
    state_bytes=12,
    activation_bytes=2,
    batch=2,
    seq_len=16,
    mixed=True,
    fused=True,
    recomputed=False,
    offloaded=False,
    streamed=False,
)


def row(**changes) -> "benchmark.EstimateRow":
    estimates = dict.fromkeys(benchmark.ESTIMATORS, 150)
    known = ("cookbook",)
    return replace(benchmark.EstimateRow("a step", 200, 100, 200, estimates, known), **changes)


# ------------------------------------------------------------------ formulas


def test_sixteen_bytes_per_weight():
    assert benchmark.sixteen_bytes(INPUTS) == 16_000


def test_states_count_trained_weights_in_their_dtypes():
    assert benchmark.states(INPUTS) == 2 * 1000 + (2 + 12) * 100


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 256 * (3 * 34 + 54)),  # 54 = 4 · (1 + 12.5)
        ({"fused": False}, 256 * (3 * (34 + 20) + 54)),
        ({"recomputed": True}, 256 * (3 * 2 + 54)),
        ({"activation_bytes": 4}, 2 * 256 * (3 * 34 + 54)),
        ({"batch": 1}, 128 * (3 * 34 + 54)),
    ],
)
def test_korthikantis_activations(changes, expected):
    inputs = replace(INPUTS, **changes)
    assert benchmark.korthikanti_activations(inputs) == expected
    assert benchmark.with_activations(inputs) == benchmark.states(inputs) + expected


@pytest.mark.parametrize(
    ("changes", "activations"),
    [
        ({}, 256 * 3 * (34 + 20)),
        ({"recomputed": True}, 256 * 3 * 34),
        ({"activation_bytes": 4}, 256 * 3 * (66 + 36)),
    ],
)
def test_the_cookbooks_activations(changes, activations):
    inputs = replace(INPUTS, **changes)
    assert benchmark.cookbook(inputs) == 3400 + activations


@pytest.mark.parametrize(
    ("offloaded", "streamed", "second", "third"),
    [(False, False, 20_000, 19_200), (True, False, 2_000, 3_200), (True, True, 2_000, 1_200)],
)
def test_deepspeeds_estimates(offloaded, streamed, second, third):
    inputs = replace(INPUTS, offloaded=offloaded, streamed=streamed)
    assert (benchmark.deepspeed_2(inputs), benchmark.deepspeed_3(inputs)) == (second, third)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_they_equal_the_packages(cpu_offload):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
        third = importlib.import_module("deepspeed.runtime.zero.stage3")
    _, bytes_2 = second.estimate_zero2_model_states_mem_needs(1001, 1, 1, cpu_offload)
    assert benchmark.deepspeed_zero2_gpu_bytes(1001, cpu_offload) == bytes_2
    for params in (False, True):
        _, bytes_3, _ = third.estimate_zero3_model_states_mem_needs(
            1001, 77, 1, 1, cpu_offload, params
        )
        assert benchmark.deepspeed_zero3_gpu_bytes(1001, 77, cpu_offload, params) == bytes_3


@pytest.mark.parametrize(("techniques", "times"), [("plain", 4), ("master-weights", 2)])
def test_accelerates_estimate_is_the_largest_of_its_figures(techniques, times):
    pytest.importorskip("accelerate")
    case = Case("tiny", 1, 8, techniques)
    tensors = [*benchmark.empty_model(case).parameters(), *benchmark.empty_model(case).buffers()]
    model_bytes = sum(4 * tensor.numel() for tensor in tensors)
    found = benchmark.accelerate_bytes(case, benchmark.inputs_of(case))
    assert found == times * model_bytes


# ------------------------------------------------------------------ inputs of the estimators


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("tiny", 3, 8), (4, 4, 8, 4, 3)),
        (Case("tiny", 3, 8, "plain", benchmark.BF16), (2, 2, 4, 2, 3)),
        (Case("tiny", 3, 8, "autocast"), (4, 4, 8, 2, 3)),
        (Case("tiny", 3, 8, "bfloat16"), (2, 2, 4, 2, 3)),
        (Case("tiny", 3, 8, "master-weights"), (2, 2, 12, 2, 3)),
        (Case("tiny", 3, 8, "adam8bit+accumulation"), (4, 4, 2, 4, 1)),
        (Case("tiny", 3, 8, "lion"), (4, 4, 4, 4, 3)),
        (Case("tiny", 3, 8, "lion8bit", benchmark.BF16), (2, 2, 1, 2, 3)),
        (Case("tiny", 3, 8, "adam-mini", benchmark.BF16), (2, 2, 2, 2, 3)),
        (Case("tiny", 3, 8, "sgd"), (4, 4, 0, 4, 3)),
    ],
)
def test_estimators_get_the_actual_element_sizes(case, expected):
    inputs = benchmark.inputs_of(case)
    sizes = (
        inputs.weight_bytes,
        inputs.gradient_bytes,
        inputs.state_bytes,
        inputs.activation_bytes,
    )
    assert (*sizes, inputs.batch) == expected
    assert inputs.weights == inputs.trained == case.config.parameters


def test_with_lora_estimators_get_the_trained_weights():
    case = Case("tiny", 1, 8, "lora")
    model = build(case.setting, combined("lora")).model
    inputs = benchmark.inputs_of(case)
    assert inputs.weights == sum(p.numel() for p in model.parameters())
    assert inputs.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert inputs.trained < inputs.weights
    assert inputs.largest_layer == 256 * 32


def test_estimators_get_recomputation_and_offloading():
    def flags(techniques: str) -> tuple[bool, ...]:
        inputs = benchmark.inputs_of(Case("tiny", 1, 8, techniques))
        return inputs.fused, inputs.recomputed, inputs.offloaded, inputs.streamed

    assert flags("plain") == (True, False, False, False)
    assert flags("checkpointing+eager-attention") == (False, True, False, False)
    assert flags("offloaded-optimizer") == (True, False, True, False)
    assert flags("streamed-layers") == (True, False, True, True)


@pytest.mark.parametrize(
    ("case", "supported_by"),
    [
        (Case("tiny", 1, 8), {"16 bytes a weight", "accelerate"}),
        (Case("tiny", 1, 8, "master-weights"), {"16 bytes a weight", "accelerate", "DeepSpeed 2",
                                                "DeepSpeed 3"}),
        (Case("tiny", 1, 8, "checkpointing"), set()),
        (Case("tiny", 1, 8, "streamed-layers+master-weights"), {"DeepSpeed 3"}),
        (Case("tiny", 1, 8, "chunked-loss"), None),
    ],
)  # fmt: skip
def test_each_estimator_supports_its_own_techniques(case, supported_by):
    formulas = {"with activations", "cookbook"} & benchmark.ESTIMATORS.keys()
    if "streamed-layers" in case.techniques:
        formulas = set()
    expected = set() if supported_by is None else supported_by | formulas
    assert {n for n, e in benchmark.ESTIMATORS.items() if e.supports(case)} == expected


# ------------------------------------------------------------------ comparison


def test_there_are_enough_distinct_configurations():
    assert len(benchmark.CASES) >= 20
    assert len(set(map(str, benchmark.CASES))) == len(benchmark.CASES)
    for case in benchmark.CASES:
        build(Setting("tiny", 1, 8), combined(case.techniques))  # raises for unsupported techniques
    used = {row for case in benchmark.CASES for row in case.rows}
    assert used >= {"float32", "bfloat16", "autocast", "master-weights", "adam8bit", "lora",
                    "checkpointing", "chunked-loss", "step-in-backward", "accumulation",
                    "offloaded-optimizer", "int8-activations"}  # fmt: skip


@pytest.fixture(scope="module")
def compared():
    return benchmark.compared(benchmark.QUICK[1])


def test_the_measurement_is_a_real_second_step(compared):
    case = benchmark.QUICK[1]
    training = build(case.setting, combined(case.techniques))
    training.step()
    trace = measured(training)
    assert not trace.dry
    assert compared.measured_bytes == trace.peak_bytes
    kept = (
        14 * case.config.parameters
    )  # bfloat16 weights, master weights and moments, without gradients
    assert kept < compared.states_bytes < trace.peak_bytes


def test_the_prediction_is_exact(compared):
    assert compared.off == 0


def test_a_wrong_prediction_is_reported(monkeypatch):
    trace = Trace((Event(1000, 1, "inputs", "op", "", "forward", "uint8", (1000,)),))
    monkeypatch.setattr(benchmark, "dry_trace", lambda *given: trace)
    found = benchmark.compared(Case("tiny", 1, 8, "sgd"))
    assert found.off == 1000 - found.measured_bytes < 0
    assert f"{found.off:+,} B" in benchmark.results_table([found])
    assert benchmark.sentence([found, row()]) == (
        f"1 of 2 configurations are predicted to the byte; tiny, 1 × 8, sgd is "
        f"{found.off:+,} B off."
    )


def test_the_states_are_a_peak():
    sizes = [("parameters", 10), ("activations", 99), ("gradients", 5), ("gradients", -5),
             ("optimizer_state", 3)]  # fmt: skip
    events = tuple(
        Event(size, n, category, "op", "", "forward", "uint8", (1,))
        for n, (category, size) in enumerate(sizes)
    )
    assert benchmark.most_states(Trace(events)) == 15


# ------------------------------------------------------------------ tables


def test_an_error_is_relative_to_the_measurement():
    assert row().error("cookbook") == -0.25
    assert row().error_of_states("cookbook") == 0.5
    assert row(estimates={"cookbook": None}).error("cookbook") is None


def test_a_summary_has_all_and_supported_configurations():
    estimates = dict.fromkeys(benchmark.ESTIMATORS, 300)
    third = row(estimates=estimates, supported_by=())
    found = benchmark.summaries([row(), row(predicted_bytes=202), third])
    assert found["memlab"]["all"] == (0, 0.01)
    assert found["cookbook"]["all"] == (0.25, 0.5)
    assert (found["cookbook"]["known"], found["cookbook"]["known configurations"]) == (
        (0.25, 0.25),
        2,
    )
    assert "states" not in found["cookbook"]
    assert found["accelerate"]["known"] is None
    as_states = benchmark.summaries([row(supported_by=("accelerate",))])["accelerate"]["states"]
    assert as_states == (0.5, 0.5)


def test_unsupported_configurations_are_in_parentheses():
    printed = benchmark.results_table([row()])
    assert "| a step | 200 B | exact | (-25%) | (-25%) | -25% | (-25%) |" in printed


def test_a_missing_package_is_reported_in_its_column(monkeypatch):
    missing = replace(benchmark.ESTIMATORS["accelerate"], package="no_such_package")
    monkeypatch.setitem(benchmark.ESTIMATORS, "accelerate", missing)
    found = benchmark.compared(Case("tiny", 1, 8, "sgd"))
    assert found.estimates["accelerate"] is None
    assert "| not installed |" in benchmark.results_table([found])
    assert list(benchmark.missing()) == [
        "accelerate: not installed, so its column is empty; pip install no_such_package"
    ]


def test_it_prints_and_stores_tables(tmp_path, capsys):
    assert benchmark.main(["--quick", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# The planner: CPU")
    count = len(benchmark.QUICK)
    assert f"\n{count} of {count} configurations are predicted to the byte.\n" in printed
    assert all(f"\n| {case} |" in printed for case in benchmark.QUICK)
    assert "\n| memlab | 0%, 0% |" in printed
    [results] = tmp_path.glob("*.json")
    section = json.loads(results.read_text(encoding="utf-8"))["planner"]["quick"]
    assert (section["exact"], section["of"]) == (count, count)
    assert [found["configuration"] for found in section["rows"]] == list(map(str, benchmark.QUICK))
