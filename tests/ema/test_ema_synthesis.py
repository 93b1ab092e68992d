"""Synthesis: values, outputs, memory, and interrupts."""

import copy
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from close import assert_close, is_close
from drifting import Small, drift, trained
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

import memlab
from memlab.ema import (
    PostHocEMA,
    find_snapshots,
    gamma_from_sigma,
    impulse_response,
    power_profile,
    prune,
    solve_weights,
    synthesize,
)
from memlab.ema import synthesis as module
from memlab.ema.selection import chosen
from memlab.ema.synthesis import CHUNK, ROWS

STEPS = 200


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Yield a folder of exact snapshots, the model, and the weights at each step."""
    torch.manual_seed(0)
    folder, model, seen = tmp_path_factory.mktemp("run"), Small(), []
    ema = PostHocEMA(model, folder, snapshot_every=10, snapshot_dtype=torch.float32)
    for step in range(1, STEPS + 1):
        drift(model, step)
        ema.update(step)
        seen.append(model.hidden.weight.detach().double().clone())
    return folder, model, seen


def straight(seen, sigma):
    """Average all weights seen, without snapshots."""
    counts = impulse_response(range(1, len(seen) + 1), gamma_from_sigma(sigma))
    return sum(count * weight for count, weight in zip(counts, seen, strict=True))


def outer_loop(folder, sigma, at=STEPS):
    """Sum whole snapshots with the safetensors library in float64."""
    found = [s for s in find_snapshots(folder) if s.step <= at]
    weights = solve_weights([s.profile for s in found], power_profile(sigma, at))
    loaded = [load_file(s.path) for s in found]
    return {
        name: sum(w * tensors[name].double() for w, tensors in zip(weights, loaded, strict=True))
        for name in found[0].shapes
        if name not in found[0].followed
    }


# ------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("sigma", "within"), [(0.05, 3e-5), (0.10, 3e-5), (0.07, 1e-3), (0.15, 1e-3)]
)
def test_it_approximates_the_average_of_all_weights(run, sigma, within):
    """Tracked widths are exact. Others are approximate: a random walk with steps of 0.1."""
    folder, _, seen = run
    found = synthesize(folder, sigma)["hidden.weight"]
    assert found.dtype == torch.float32
    assert (found - straight(seen, sigma)).abs().max() < within


@pytest.mark.parametrize("sigma", [0.06, 0.12, 0.2])
def test_it_equals_a_simple_loop_over_snapshots(run, sigma):
    found, wanted = synthesize(run[0], sigma), outer_loop(run[0], sigma)
    for name, tensor in wanted.items():
        assert_close(found[name], tensor.float())


def test_an_earlier_time_equals_training_that_ended_there(run):
    folder, _, seen = run
    found = synthesize(folder, 0.07, at=100)
    assert (found["hidden.weight"] - straight(seen[:100], 0.07)).abs().max() < 3e-3
    assert found["norm.num_batches_tracked"] == 100
    assert torch.equal(found["norm.running_mean"], torch.full((16,), 100 / 3))


def test_a_time_without_a_snapshot_is_an_error(run):
    with pytest.raises(ValueError, match=r"got at=104, when no snapshot was taken.* such as 100"):
        synthesize(run[0], 0.07, at=104)


def test_tensors_that_are_not_averaged_equal_the_live_models(run):
    folder, model, _ = run
    found = synthesize(folder, 0.07)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen"):
        assert torch.equal(found[name], model.state_dict()[name])
        assert found[name].dtype == model.state_dict()[name].dtype
    assert torch.equal(found["frozen"], model.frozen)


def test_new_tensors_are_a_state_dict_with_tied_weights_as_one(run):
    found = synthesize(run[0], 0.07)
    model = Small()
    model.load_state_dict(found)
    assert found["head.weight"] is found["embedding.weight"]


def test_several_widths_equal_separate_calls(run):
    sigmas = (0.06, 0.07, 0.10, 0.2)
    for sigma, found in zip(sigmas, synthesize(run[0], sigmas), strict=True):
        alone = synthesize(run[0], sigma)
        for name, tensor in alone.items():
            assert_close(found[name], tensor)


def test_the_chunk_size_does_not_change_the_result(tmp_path, monkeypatch):
    trained(nn.Linear(100, 99), tmp_path, 40, snapshot_dtype="int8")
    whole = synthesize(tmp_path, 0.07)
    monkeypatch.setattr(module, "CHUNK", 512)
    cut = synthesize(tmp_path, 0.07)
    for name, tensor in whole.items():
        assert_close(cut[name], tensor)


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), ("int8", 2e-2)]
)
def test_rounded_snapshots_give_nearly_the_same(dtype, within, tmp_path):
    model = nn.Linear(100, 100)
    trained(copy.deepcopy(model), tmp_path / "exact", 100, snapshot_dtype=torch.float32)
    trained(model, tmp_path / "rounded", 100, snapshot_dtype=dtype)
    exact, rounded = (synthesize(tmp_path / f, 0.07)["weight"] for f in ("exact", "rounded"))
    assert 0 < (exact - rounded).abs().max() < within


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_sums_are_exact_for_any_matmul_precision_of_training(precision, run, monkeypatch):
    wanted, seen = outer_loop(run[0], 0.07), []
    products = torch.backends.mkldnn.matmul
    proper = module._weighted_sums
    monkeypatch.setattr(
        module,
        "_weighted_sums",
        lambda *arguments: (seen.append(products.fp32_precision), proper(*arguments)),
    )
    torch.set_float32_matmul_precision(precision)
    try:
        before = products.fp32_precision
        found = synthesize(run[0], 0.07)
        assert products.fp32_precision == before
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"ieee"}
    for name, tensor in wanted.items():
        assert_close(found[name], tensor.float())


def test_pruned_snapshots_give_nearly_the_same(run):
    everything = find_snapshots(run[0])
    pruned = prune(everything, [0.15], error=1e-2)
    assert pruned.every > 1
    whole, few = (synthesize(s, 0.15)["hidden.weight"] for s in (everything, pruned.kept))
    assert (whole - few).abs().max() < 0.1


def test_a_width_out_of_reach_is_a_warning(tmp_path):
    trained(nn.Linear(2, 2), tmp_path, 20)
    with pytest.warns(UserWarning, match=r"4 snapshots approximate sigma 0\.25 with .* of 0\.53"):
        synthesize(tmp_path, 0.25)


class OneHots(nn.Module):
    """At step k, element k of every tensor is 1, so each tensor shows what it counts each step."""

    def __init__(self, steps, sizes):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(steps, size).double() for size in sizes)

    @torch.no_grad()
    def go_to(self, step):
        for weight in self.weights:
            weight.zero_()[step - 1] = 1


@pytest.mark.few(1)
@pytest.mark.parametrize("sigma", [0.03, 0.07, 0.2])
def test_every_tensor_counts_each_step_alike(sigma, tmp_path):
    """Tensors of part of a chunk, of one chunk and more, and of several."""
    steps, sizes = 64, (1, 3, 2**11, 2**11 + 5, 5000)
    model = OneHots(steps, sizes)
    ema = PostHocEMA(model, tmp_path, every=2, snapshot_every=4, snapshot_dtype=torch.float64)
    for step in range(1, steps + 1):
        model.go_to(step)
        ema.update(step)
    found = synthesize(tmp_path, sigma, dtype=torch.float64)
    profiles = [s.profile for s in find_snapshots(tmp_path)]
    shares = solve_weights(profiles, power_profile(sigma, steps))
    wanted = torch.zeros(steps, dtype=torch.float64)
    for share, (end, gamma) in zip(shares, profiles, strict=True):
        times = range(2, end + 1, 2)
        wanted[1:end:2] += share * torch.tensor(impulse_response(times, gamma))
    for tensor in found.values():
        assert (tensor - wanted[:, None]).abs().max() < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float16, "int8"])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_batches_of_tensors_give_the_same_bits(batch, dtype, tmp_path):
    model = nn.ParameterDict({f"w{n}": torch.randn(300, 500) for n in range(4)})
    trained(model, tmp_path, 60, snapshot_dtype=dtype)
    whole = synthesize(tmp_path, (0.07, 0.12))
    names = list(whole[0])
    for start in range(0, len(names), batch):
        part = names[start : start + batch]
        for of_each, wanted in zip(
            synthesize(tmp_path, (0.07, 0.12), only=part), whole, strict=True
        ):
            assert list(of_each) == part
            assert all(torch.equal(of_each[name], wanted[name]) for name in part)


# ------------------------------------------------------------------ outputs


def test_a_model_is_written_in_place(run):
    wanted, model = synthesize(run[0], 0.07), Small()
    weight = model.hidden.weight
    assert synthesize(run[0], 0.07, out=model) is model
    assert model.hidden.weight is weight
    assert model.head.weight is model.embedding.weight
    for name, tensor in wanted.items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_model_keeps_its_dtype_and_layout(tmp_path):
    trained(nn.Conv2d(4, 6, 3), tmp_path, 30)
    wanted = synthesize(tmp_path, 0.07)["weight"]
    half = synthesize(tmp_path, 0.07, out=nn.Conv2d(4, 6, 3).bfloat16())
    assert torch.equal(half.weight, wanted.bfloat16())
    last = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    synthesize(tmp_path, 0.07, out=last)
    assert torch.equal(last.weight, wanted)
    assert last.weight.is_contiguous(memory_format=torch.channels_last)


def test_given_tensors_are_written_in_place(run):
    wanted = synthesize(run[0], 0.07)
    there = {"hidden.weight": torch.full((16, 16), torch.nan, dtype=torch.float64)}
    found = synthesize(run[0], 0.07, out=there, only="hidden.weight")
    assert found is there
    assert torch.equal(there["hidden.weight"].float(), wanted["hidden.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_has_the_same_tensors(run, dtype, tmp_path):
    path = tmp_path / "average.safetensors"
    assert synthesize(run[0], 0.07, out=path, dtype=dtype) == path
    found, wanted = load_file(path), synthesize(run[0], 0.07, dtype=dtype)
    assert found.keys() == wanted.keys() - {"head.weight"}
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor, wanted[name])


def test_each_width_goes_to_its_own_output(run, tmp_path):
    model, path = Small(), tmp_path / "x.safetensors"
    found = synthesize(run[0], (0.06, 0.07, 0.2), out=(path, model, None))
    assert found[:2] == [path, model]
    shortest = synthesize(run[0], 0.06)["hidden.weight"]
    assert is_close(load_file(path)["hidden.weight"], shortest)
    assert not is_close(model.hidden.weight, shortest)
    assert is_close(model.hidden.weight, synthesize(run[0], 0.07)["hidden.weight"])
    assert is_close(found[2]["hidden.weight"], synthesize(run[0], 0.2)["hidden.weight"])


def test_too_few_outputs_are_an_error(run):
    with pytest.raises(ValueError, match="got 1 of out for 2 sigmas"):
        synthesize(run[0], (0.06, 0.07), out=[Small()])


def test_a_model_of_other_shapes_is_an_error_before_anything_is_written(run):
    other = Small()
    other.hidden = nn.Linear(16, 8)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"'hidden\.\w+' of shape .*, wanted \(16"):
        synthesize(run[0], 0.07, out=other)
    with pytest.raises(ValueError, match=r"'embedding\.weight' of shape none, wanted \(40, 16\)"):
        synthesize(run[0], 0.07, out={})
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


# ------------------------------------------------------------------ part of a model

NAMES = [
    "blocks.0.attention.weight",
    "blocks.0.norm.weight",
    "blocks.10.norm.weight",
    "head.weight",
]


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        ("head.weight", [3]),
        ("head", [3]),
        ("blocks.0", [0, 1]),
        ("blocks.1", None),
        ("*.norm", [1, 2]),
        ("*.norm.weight", [1, 2]),
        (["head", "blocks.?.norm"], [1, 3]),
        ("blocks", [0, 1, 2]),
        ("Head", None),
    ],
)
def test_only_chooses_by_name_by_module_and_by_pattern(only, wanted):
    if wanted is None:
        with pytest.raises(ValueError, match=f"got only='{only}', which fits none of 4 tensors"):
            chosen(NAMES, only)
    else:
        assert chosen(NAMES, only) == [NAMES[i] for i in wanted]


def test_only_selected_tensors_are_written(run):
    model = Small()
    before = copy.deepcopy(model.state_dict())
    synthesize(run[0], 0.07, out=model, only="hidden")
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {"hidden.weight", "hidden.bias"}


def test_new_tensors_are_only_the_selected_ones(run):
    assert synthesize(run[0], 0.07, only=["norm", "embedding"]).keys() == {
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
        *("norm.num_batches_tracked", "embedding.weight", "head.weight"),
    }


# ------------------------------------------------------------------ bytes


def buffers(folder, targets, out):
    """Return the memory of synthesis alone, without mapped files and given tensors."""
    snapshots = find_snapshots(folder)
    mapped = sum(snapshot.nbytes for snapshot in snapshots)
    sigmas = [0.06, 0.07, 0.08, 0.1][:targets]
    given = sum(t.nbytes for model in out for t in model.parameters())
    trace = memlab.measure(lambda: synthesize(snapshots, sigmas, out=out))
    return trace.peak_bytes - mapped - given


@pytest.mark.few(2)
@pytest.mark.parametrize("targets", [1, 4])
@pytest.mark.parametrize("steps", [40, 50, 120])
def test_the_buffers_are_a_chunk_per_width_and_eight_more(targets, steps, tmp_path):
    trained(nn.Linear(1000, 300, bias=False), tmp_path, steps)
    out = [nn.Linear(1000, 300, bias=False) for _ in range(targets)]
    shares = targets * 2 * (steps // 10) * 4  # in float32
    assert buffers(tmp_path, targets, out) == (targets + ROWS) * CHUNK * 4 + shares


def test_int8_adds_the_memory_for_decoding_one_chunk(tmp_path):
    """Codes are mapped. Decoding a chunk takes temporaries."""
    for steps in (40, 120):
        folder = tmp_path / str(steps)
        trained(nn.Linear(1000, 300, bias=False), folder, steps, snapshot_dtype="int8")
        beside = buffers(folder, 1, [nn.Linear(1000, 300, bias=False)]) - (1 + ROWS) * CHUNK * 4
        assert 0 < beside <= 4 * CHUNK * 4


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_four_widths_of_a_model_of_128_mib_take_less_than_64_mib_of_anonymous_memory(tmp_path):
    """A separate process writes four files from 20 snapshots; its buffers take at most 12 MiB."""
    script = Path(__file__).with_name("large_synthesis.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 64 * 2**20


# ------------------------------------------------------------------ interrupts


def interrupting(monkeypatch, target, calls):
    """Raise KeyboardInterrupt at the given call of a function."""
    owner, name = target
    proper, count = getattr(owner, name), iter(range(10**6))

    def interrupted(*arguments):
        if next(count) == calls:
            signal.raise_signal(signal.SIGINT)
        return proper(*arguments)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("calls", [0, 3])
def test_ctrl_c_leaves_files_as_they_were(calls, run, tmp_path, monkeypatch):
    (tmp_path / "old.safetensors").write_bytes(b"what was there")
    interrupting(monkeypatch, (module.TensorWriter, "write"), calls)
    out = [tmp_path / "old.safetensors", tmp_path / "new.safetensors"]
    with pytest.raises(KeyboardInterrupt):
        synthesize(run[0], (0.06, 0.07), out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["old.safetensors"]
    assert out[0].read_bytes() == b"what was there"


def test_ctrl_c_while_writing_a_model_adds_a_note_and_a_second_call_completes_it(run, monkeypatch):
    model = Small()
    with monkeypatch.context() as patched:
        interrupting(patched, (module._ToTensors, "write"), 3)
        with pytest.raises(KeyboardInterrupt) as caught:
            synthesize(run[0], 0.07, out=model)
    assert "only partly written" in caught.value.__notes__[0]
    wanted = synthesize(run[0], 0.07)
    synthesize(run[0], 0.07, out=model)
    assert all(torch.equal(model.state_dict()[name], wanted[name]) for name in wanted)


# ------------------------------------------------------------------ progress


@pytest.mark.parametrize(
    ("seconds", "is_terminal", "shown"), [(0, True, True), (1e9, True, False), (0, False, False)]
)
def test_a_bar_shows_on_a_terminal_when_it_takes_long(
    seconds, is_terminal, shown, run, monkeypatch
):
    screen = io.StringIO()
    monkeypatch.setattr(module, "BAR_AFTER_SECONDS", seconds)
    monkeypatch.setattr(
        module, "Console", lambda **_: Console(file=screen, force_terminal=is_terminal)
    )
    synthesize(run[0], 0.07)
    assert ("averaging" in screen.getvalue()) == shown


def test_a_bar_does_not_show_in_a_notebook(run, monkeypatch):
    """Whether one showed would depend on the load of the machine."""
    shown = []
    monkeypatch.setattr(module, "BAR_AFTER_SECONDS", 0)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("IPython.display.display", shown.append)
    synthesize(run[0], 0.07)
    assert shown == []


# ------------------------------------------------------------------ common mistakes


@pytest.fixture
def three(tmp_path):
    """A folder with snapshots at three times."""
    return trained(Small(), tmp_path / "three", 30).folder


def test_an_output_cannot_have_a_snapshots_name_in_their_folder(three):
    [first, *_] = find_snapshots(three)
    before = first.path.read_bytes()
    for path in (first.path, three / "ema-15.safetensors"):
        with pytest.raises(ValueError, match="a snapshot's name in the snapshots' folder"):
            synthesize(three, 0.07, out=path)
    assert first.path.read_bytes() == before
    synthesize(three, 0.07, out=three / "average.safetensors")
    assert len(find_snapshots(three)) == 6


@pytest.mark.parametrize("sigma", [None, "0.1", 0.4, [0.1, None]])
def test_a_width_that_is_none_is_refused(three, sigma):
    with pytest.raises(ValueError, match=r"got sigma .*, wanted a value between 0 and"):
        synthesize(three, sigma)


def test_several_averages_need_a_list_of_outputs(three, tmp_path):
    with pytest.raises(ValueError, match="got no sigma"):
        synthesize(three, [])
    for out in ("xy", tmp_path / "a.safetensors", Small(), [None]):
        with pytest.raises(ValueError, match="got 1 of out for 2 sigmas; give a list"):
            synthesize(three, [0.06, 0.07], out=out)
    with pytest.raises(ValueError, match="twice; give each average its own file"):
        synthesize(three, [0.06, 0.07], out=[tmp_path / "a.safetensors"] * 2)
    with pytest.raises(ValueError, match="whose folder does not exist"):
        synthesize(three, 0.07, out=tmp_path / "none" / "a.safetensors")
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_file_truncated_after_it_was_found_is_an_error(three):
    found = find_snapshots(three)
    os.truncate(found[2].path, found[2].nbytes - 100)
    with pytest.raises(ValueError, match="is truncated: got"):
        synthesize(found, 0.07)


def test_prune_requires_snapshots_and_accepts_a_single_width(three):
    with pytest.raises(TypeError, match="give find_snapshots"):
        prune(three, [0.07], error=0.1)
    assert prune(find_snapshots(three), 0.07, error=0.1).errors.keys() == {0.07}
