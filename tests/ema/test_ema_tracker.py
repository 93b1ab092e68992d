"""The tracker: its averages, clock, memory, and resuming."""

import copy

import pytest
import torch
from close import assert_close
from drifting import OneHot, Small, drift, go_on, responses, trained
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab.ema import (
    PostHocEMA,
    find_snapshots,
    gamma_from_sigma,
    impulse_response,
    relative_width,
    synthesize,
)
from memlab.internals.chunks import CHUNK_SIZE, CHUNK_SIZE_ON_ACCELERATOR
from memlab.internals.torch_internals import foreach_lerp_
from memlab.offload import DiskStore

SIGMAS = (0.05, 0.10)


def same(a, b):
    """To the bit."""
    return all(
        torch.equal(x, y)
        for one, other in zip(a.averages.values(), b.averages.values(), strict=True)
        for x, y in zip(one.values(), other.values(), strict=True)
    )


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("every", [1, 10, 100])
def test_each_step_counts_as_in_the_closed_form(every, tmp_path):
    steps, seen = 1000, slice(every - 1, None, every)
    for sigma, found in zip(SIGMAS, responses(steps, SIGMAS, every, tmp_path), strict=True):
        times = range(every, steps + 1, every)
        wanted = impulse_response(times, gamma_from_sigma(sigma))
        assert found.dtype == torch.float64
        assert found[seen].numpy() == pytest.approx(wanted, abs=1e-12)
        assert found.sum() == pytest.approx(1, abs=1e-12)  # so no other step counts


@pytest.mark.parametrize("every", [1, 10, 100])
def test_an_average_has_the_requested_width(every, tmp_path):
    steps = 10_000 if every == 100 else 1000
    for sigma, found in zip(SIGMAS, responses(steps, SIGMAS, every, tmp_path), strict=True):
        assert relative_width(range(1, steps + 1), found) == pytest.approx(sigma, rel=0.02)


def test_updates_at_uneven_steps_are_right_too(tmp_path):
    model = OneHot(100)
    ema = PostHocEMA(model, tmp_path)
    times = [3, 4, 20, 57, 100]
    for step in times:
        model.go_to(step)
        assert ema.update(step)
    found = ema.averages[0.10]["weight"]
    wanted = impulse_response(times, gamma_from_sigma(0.10))
    assert [found[step - 1].item() for step in times] == pytest.approx(wanted, abs=1e-12)


def test_a_clock_of_images_has_the_same_average_as_one_of_steps(tmp_path):
    model, averages = nn.Linear(5, 5), []
    for per_step in (1, 2048, 0.5):
        copied = copy.deepcopy(model)
        ema = PostHocEMA(copied, tmp_path / str(per_step), every=per_step)
        for step in range(1, 31):
            drift(copied, step)
            ema.update(step * per_step)
        averages.append(ema.averages[0.05]["weight"])
    assert_close(averages[0], averages[1])
    assert_close(averages[0], averages[2])


def test_the_first_update_forgets_the_weights_before_training(tmp_path):
    model = nn.Linear(3, 3)
    ema = PostHocEMA(model, tmp_path)
    drift(model, 1)
    ema.update(1)
    assert torch.equal(ema.averages[0.05]["weight"], model.weight)


def test_between_updates_nothing_happens(tmp_path):
    model = nn.Linear(3, 3)
    ema = PostHocEMA(model, tmp_path, every=10)
    assert [step for step in range(1, 36) if ema.update(step)] == [10, 20, 30]
    assert ema.step == 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_have_32_bit_averages(dtype, tmp_path):
    """Compare with float32 weights; 300,000 elements take more than one chunk."""
    model = nn.Linear(600, 500).to(dtype)
    exact = copy.deepcopy(model).float()
    ema, wanted = PostHocEMA(model, tmp_path), PostHocEMA(exact, tmp_path)
    for step in (1, 2, 3):
        drift(model, step)
        exact.load_state_dict(model.state_dict())
        ema.update(step)
        wanted.update(step)
    assert ema.averages[0.05]["weight"].dtype == torch.float32
    assert same(ema, wanted)


def test_noncontiguous_weights_are_averaged(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        plain = nn.Conv2d(4, 6, 3).to(dtype)
        last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        one, other = PostHocEMA(plain, tmp_path), PostHocEMA(last, tmp_path)
        for step in (1, 2, 3):
            drift(plain, step)
            last.load_state_dict(plain.state_dict())
            one.update(step)
            other.update(step)
        assert not last.weight.is_contiguous()
        assert same(one, other)


def test_tied_weights_count_once_and_other_tensors_follow_the_model(tmp_path):
    ema = PostHocEMA(Small(), tmp_path)
    assert set(ema.averages[0.05]) == {
        *("embedding.weight", "hidden.weight", "hidden.bias", "norm.weight", "norm.bias"),
    }


# ------------------------------------------------------------------ the clock


@pytest.mark.parametrize("step", [10, 9, 0, -1, float("nan"), float("inf")])
def test_a_clock_that_does_not_advance_is_an_error(step, tmp_path):
    ema = PostHocEMA(nn.Linear(2, 2), tmp_path)
    ema.update(10)
    with pytest.raises(ValueError, match="wanted a step above the last update's, 10"):
        ema.update(step)


@pytest.mark.parametrize("step", [True, "3", None])
def test_a_step_that_is_not_a_number_is_an_error(step, tmp_path):
    with pytest.raises(TypeError, match="wanted a number"):
        PostHocEMA(nn.Linear(2, 2), tmp_path).update(step)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("sigmas", [(0.05, 0.10), (0.05, 0.10, 0.2)])
def test_k_averages_take_4_k_bytes_per_weight_and_updates_no_temporaries(sigmas, tmp_path):
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 7))
    P = sum(p.numel() for p in model.parameters())
    ema = PostHocEMA(model, tmp_path, sigmas)
    assert ema.nbytes == 4 * len(sigmas) * P
    trace = memlab.measure(lambda: ema.update(1), model=model)
    assert trace.peak_bytes == 4 * P + 4 * len(sigmas) * P


def test_an_update_of_16_bit_weights_takes_one_chunk(tmp_path):
    model = nn.Linear(1000, 1000, bias=False).bfloat16()
    ema = PostHocEMA(model, tmp_path)
    trace = memlab.measure(lambda: ema.update(1), model=model)
    assert trace.peak_bytes == 2 * 10**6 + ema.nbytes + 4 * CHUNK_SIZE


def test_a_snapshot_takes_two_chunks_for_any_model(tmp_path):
    """The chunk being written and the next one."""
    model = nn.Linear(2000, 1000, bias=False)
    ema = PostHocEMA(model, tmp_path)
    ema.update(1)
    trace = memlab.measure(ema.snapshot, model=model)
    numbers = 2 * 10**6
    assert trace.peak_bytes - 4 * numbers - ema.nbytes == 2 * (2 * CHUNK_SIZE) + 8


def test_a_dry_run_has_the_same_bytes_and_writes_nothing(tmp_path):
    def run(folder):
        model = nn.Linear(1000, 1000, bias=False)
        ema = PostHocEMA(model, folder, snapshot_every=1)
        return memlab.measure(lambda: ema.update(1), model=model).peak_bytes

    with memlab.dry_run():
        dry = run(tmp_path / "dry")
    assert not (tmp_path / "dry").exists()
    real = run(tmp_path / "real")
    assert abs(real - dry) <= 8  # from a check for infinities, which a dry run skips
    assert len(find_snapshots(tmp_path / "real")) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_an_update_takes_no_temporary_or_one_chunk(dtype, tmp_path):
    model = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=dtype)
    ema = PostHocEMA(model, tmp_path, snapshot_every=3)
    ema.update(1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ema.update(2)
    beside = torch.cuda.max_memory_allocated() - before
    assert beside <= (0 if dtype == torch.float32 else 4 * CHUNK_SIZE_ON_ACCELERATOR)
    ema.update(3)
    found = synthesize(tmp_path, 0.05, out=copy.deepcopy(model)).weight
    assert found.is_cuda
    assert_close(found.float(), ema.averages[0.05]["weight"], terms=2, dtype=torch.bfloat16)


# ------------------------------------------------------------------ averages on the CPU


def predicted(device, dtype=torch.float32, mib=16, sigmas=SIGMAS):
    """Predict an update's memory on a GPU, and count the bytes that it copies to the host."""
    sent = Sent()

    def build():
        model = nn.ParameterList(torch.zeros(2**18, dtype=dtype, device="cuda") for _ in range(mib))
        ema = PostHocEMA(model, "nowhere", sigmas, device=device)
        steps = iter((1, 2))

        def update():
            with sent:
                ema.update(next(steps))

        return update, model, None

    return memlab.predict(build, steps=1), sent.bytes


class Sent(TorchDispatchMode):
    """Count the bytes of tensors copied to another device."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten._to_copy.default and result.device != args[0].device:
            self.bytes += result.nbytes
        return result


def test_averages_on_the_cpu_take_no_memory_of_the_gpu():
    """16 MiB of weights, and two averages of 16 MiB each."""
    on_the_gpu, _ = predicted(None)
    on_the_host, _ = predicted("cpu")
    assert on_the_gpu.peak_bytes == 48 * 2**20
    assert on_the_host.peak_bytes == 16 * 2**20


@pytest.mark.few(1)
@pytest.mark.parametrize("sigmas", [(0.05, 0.10), (0.05, 0.10, 0.2)])
def test_an_update_sends_the_weights_to_the_cpu_once_for_any_number_of_averages(sigmas):
    _, sent = predicted("cpu", sigmas=sigmas)
    assert sent == 16 * 2**20
    _, sent = predicted(None, sigmas=sigmas)
    assert sent == 0


def test_16_bit_weights_are_sent_in_16_bits_and_cast_on_the_cpu():
    trace, sent = predicted("cpu", torch.bfloat16)
    assert sent == 8 * 2**20
    assert trace.peak_bytes == 8 * 2**20


# ------------------------------------------------------------------ a part of the model


def test_a_part_takes_its_share_of_the_bytes(tmp_path):
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 7))
    ema = PostHocEMA(model, tmp_path, only="1")
    part = 1000 * 7 + 7
    assert ema.nbytes == 2 * 4 * part
    trace = memlab.measure(lambda: ema.update(1), model=model)
    assert trace.peak_bytes == 4 * 1000 * 1000 + 4 * part + ema.nbytes
    ema.snapshot()
    for snapshot in find_snapshots(tmp_path):
        assert snapshot.shapes == {"1.bias": (7,), "1.weight": (7, 1000)}
        assert snapshot.nbytes == snapshot.file.places["1.bias"].offset + 2 * part


@pytest.mark.parametrize(
    ("only", "tracked", "followed"),
    [
        ("hidden", {"hidden.weight", "hidden.bias"}, set()),
        ("*.weight", {"embedding.weight", "hidden.weight", "norm.weight"}, set()),
        (
            ["hidden.bias", "norm"],
            {"hidden.bias", "norm.weight", "norm.bias"},
            {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"},
        ),
        (lambda name: name.endswith(".bias"), {"hidden.bias", "norm.bias"}, set()),
        ("head", {"embedding.weight"}, set()),  # tied
        (("hidden.bias", "frozen"), {"hidden.bias"}, {"frozen"}),
    ],
)
def test_a_part_is_averaged_as_in_the_whole(only, tracked, followed, tmp_path):
    model = Small()
    whole = PostHocEMA(model, tmp_path / "whole", snapshot_every=10)
    part = PostHocEMA(model, tmp_path / "part", snapshot_every=10, only=only)
    for step in range(1, 31):
        drift(model, step)
        whole.update(step)
        part.update(step)
    for sigma in SIGMAS:
        assert part.averages[sigma].keys() == tracked
        for name, tensor in part.averages[sigma].items():
            assert torch.equal(tensor, whole.averages[sigma][name])
    assert find_snapshots(tmp_path / "part")[0].shapes.keys() == tracked | followed
    found, wanted = (synthesize(tmp_path / folder, 0.07) for folder in ("part", "whole"))
    assert found.keys() - {"head.weight"} == tracked | followed
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_synthesis_of_a_part_leaves_other_weights_of_a_model_as_they_are(tmp_path):
    model = Small()
    trained(model, tmp_path, 30, only="hidden")
    before = copy.deepcopy(model.state_dict())
    synthesize(tmp_path, 0.07, out=model)
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {"hidden.weight", "hidden.bias"}


@pytest.mark.parametrize("by", ["file", "dict"])
def test_a_part_is_resumed_to_the_bit_and_only_as_the_same_part(by, tmp_path):
    model = Small()
    ema = trained(model, tmp_path / "whole", 25, only="hidden")
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(ema.state_dict())
    path = ema.save(tmp_path / "state.safetensors")
    assert {name for average in state["averages"] for name in average} == {
        "hidden.weight", "hidden.bias",
    }  # fmt: skip
    go_on(model, ema, 26, 50)

    again = Small()
    again.load_state_dict(weights)
    resumed = PostHocEMA(again, tmp_path / "again", snapshot_every=10, only="hidden")
    resumed.load(path) if by == "file" else resumed.load_state_dict(state)
    go_on(again, resumed, 26, 50)
    assert same(ema, resumed)
    for only in ("norm", None):
        other = PostHocEMA(Small(), tmp_path / "other", only=only)
        with pytest.raises(ValueError, match="got a state with model "):
            other.load(path) if by == "file" else other.load_state_dict(state)


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("hiden", "got only='hiden', which fits none of 10 tensors; give a name such as "),
        (["hidden", "hiden"], "got only='hiden', which fits none"),
        (lambda name: False, "got only=<function .*, which fits none of 10 tensors"),
        ("frozen", "got only='frozen', which fits no trainable weight; give a name of one"),
    ],
)
def test_a_part_without_a_trained_weight_is_an_error(only, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        PostHocEMA(Small(), tmp_path, only=only)


@pytest.mark.parametrize("only", [3, [], [3], ["hidden", None]])
def test_a_part_that_is_not_named_is_an_error(only, tmp_path):
    with pytest.raises(TypeError, match=r"got only=.*, wanted names, patterns, or a function"):
        PostHocEMA(Small(), tmp_path, only=only)


def test_a_part_in_a_store_is_averaged_as_in_memory(tmp_path):
    model = Small()
    here = PostHocEMA(model, tmp_path / "here", only="hidden")
    away = PostHocEMA(model, tmp_path / "away", only="hidden", store=DiskStore())
    for step in (1, 2, 3):
        drift(model, step)
        here.update(step)
        away.update(step)
    assert here.nbytes == away.nbytes
    assert same(here, away)


# ------------------------------------------------------------------ resuming


@pytest.mark.parametrize("by", ["file", "dict"])
def test_a_resumed_run_is_the_same_to_the_bit(by, tmp_path):
    model = Small()
    ema = trained(model, tmp_path / "whole", 25)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(ema.state_dict())
    path = ema.save(tmp_path / "state.safetensors")
    go_on(model, ema, 26, 50)

    again = Small()
    again.load_state_dict(weights)
    resumed = PostHocEMA(again, tmp_path / "again", snapshot_every=10)
    resumed.load(path) if by == "file" else resumed.load_state_dict(state)
    assert resumed.step == 25
    go_on(again, resumed, 26, 50)
    assert same(ema, resumed)
    assert resumed.run == ema.run
    assert [s.step for s in find_snapshots(tmp_path / "again")] == [30, 30, 40, 40, 50, 50]


def test_resuming_removes_later_snapshots(tmp_path):
    model = nn.Linear(2, 2)
    ema = trained(model, tmp_path, 20)
    ema.save()
    go_on(model, ema, 21, 45)
    assert {s.step for s in find_snapshots(tmp_path)} == {10, 20, 30, 40}

    resumed = PostHocEMA(model, tmp_path, snapshot_every=25)
    resumed.load()
    assert {s.step for s in find_snapshots(tmp_path)} == {10, 20, 30, 40}  # before any update
    go_on(model, resumed, 21, 26)
    assert {s.step for s in find_snapshots(tmp_path)} == {10, 20, 25}


def test_the_same_tracker_can_go_back_too(tmp_path):
    model = nn.Linear(2, 2)
    ema = trained(model, tmp_path, 20)
    ema.save()
    go_on(model, ema, 21, 45)
    ema.load()
    go_on(model, ema, 21, 25)
    assert {s.step for s in find_snapshots(tmp_path)} == {10, 20}


def test_a_snapshot_cannot_be_loaded_as_a_state(tmp_path):
    ema = trained(nn.Linear(2, 2), tmp_path, 10)
    with pytest.raises(ValueError, match="a snapshot is rounded and cannot resume training"):
        ema.load(find_snapshots(tmp_path)[0].path)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sigmas": (0.05, 0.2)}, "sigmas"),
        ({"clock": "images"}, "clock"),
        ({"model": nn.Linear(2, 3)}, "model"),
    ],
)
@pytest.mark.parametrize("by", ["file", "dict"])
def test_a_state_of_another_model_or_setting_is_an_error(by, changed, named, tmp_path):
    ema = trained(nn.Linear(2, 2), tmp_path, 1)
    path = ema.save()
    other = PostHocEMA(**{"model": nn.Linear(2, 2), "folder": tmp_path, **changed})
    with pytest.raises(ValueError, match=f"got a state with {named} "):
        other.load(path) if by == "file" else other.load_state_dict(ema.state_dict())


def test_a_folder_of_another_run_is_an_error_before_anything_is_written(tmp_path):
    trained(nn.Linear(2, 2), tmp_path, 10)
    before = [(s.path, s.path.stat().st_mtime_ns) for s in find_snapshots(tmp_path)]
    other = PostHocEMA(nn.Linear(2, 2), tmp_path, snapshot_every=1)
    with pytest.raises(ValueError, match=r"is of another run: got .* load its state to resume"):
        other.update(1)
    assert other.step == 0
    assert [(s.path, s.path.stat().st_mtime_ns) for s in find_snapshots(tmp_path)] == before


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("sigmas", [(), (0.1,), (0.1, 0.1)])
def test_fewer_than_two_widths_are_an_error(sigmas, tmp_path):
    with pytest.raises(ValueError, match="wanted two or more different ones"):
        PostHocEMA(nn.Linear(2, 2), tmp_path, sigmas)


@pytest.mark.parametrize("setting", [{"every": 0}, {"snapshot_every": -1}, {"every": True}])
def test_an_invalid_interval_is_an_error(setting, tmp_path):
    with pytest.raises(ValueError, match="wanted a number above 0"):
        PostHocEMA(nn.Linear(2, 2), tmp_path, **setting)


def test_a_model_without_trained_weights_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing to average"):
        PostHocEMA(nn.Linear(2, 2).requires_grad_(False), tmp_path)


def test_complex_weights_are_an_error(tmp_path):
    with pytest.raises(TypeError, match=r"'weight' of torch\.complex64, wanted floats"):
        PostHocEMA(nn.Linear(2, 2, dtype=torch.complex64), tmp_path)


def test_weights_that_are_unfrozen_later_are_an_error(tmp_path):
    model = Small()
    ema = PostHocEMA(model, tmp_path)
    model.frozen.requires_grad_(True)
    with pytest.raises(ValueError, match="'frozen', which is trained now but was frozen"):
        ema.update(1)


def test_a_snapshot_before_the_first_update_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"call update\(step\) first"):
        PostHocEMA(nn.Linear(2, 2), tmp_path).snapshot()


# ------------------------------------------------------------------ common mistakes


def test_saving_does_not_overwrite_the_state_of_another_run(tmp_path):
    trained(Small(), tmp_path, 20).save()
    forgot = PostHocEMA(Small(), tmp_path)
    with pytest.raises(ValueError, match=r"is of another run: .*; load\(\) it to resume"):
        forgot.save()
    forgot.load()
    assert forgot.step == 20
    forgot.save()


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A tracker whose update to step 21 stopped after the first of two averages."""
    ema = trained(Small(), tmp_path, 20)
    ema.save()
    before = copy.deepcopy(ema.averages)

    def stop_at_the_second(here, there, share):
        if here[0] is ema.averages[0.10]["embedding.weight"]:
            raise KeyboardInterrupt
        foreach_lerp_(here, there, share)

    drift(ema.model, 21)
    with monkeypatch.context() as patch:
        patch.setattr("memlab.ema.averages.foreach_lerp_", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            ema.update(21)
    changed = [
        not torch.equal(before[sigma]["hidden.weight"], average["hidden.weight"])
        for sigma, average in ema.averages.items()
    ]
    assert changed == [True, False]  # the averages are of two steps now
    return ema


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("an update", lambda ema: ema.update(21)),
        ("a snapshot", lambda ema: ema.snapshot()),
        (r"save\(\)", lambda ema: ema.save()),
        (r"state_dict\(\)", lambda ema: ema.state_dict()),
    ],
)
def test_averages_of_two_steps_are_not_updated_written_or_returned(what, call, interrupted):
    """As `finally: ema.save()` would after Ctrl-C."""
    files = {path.name: path.read_bytes() for path in interrupted.folder.iterdir()}
    with pytest.raises(ValueError, match=rf"got {what} after an inter.* load\(\) the last state"):
        call(interrupted)
    assert {path.name: path.read_bytes() for path in interrupted.folder.iterdir()} == files
    interrupted.load()
    assert interrupted.update(21)
    interrupted.snapshot()


def test_tenths_of_an_epoch_are_counted_as_tenths(tmp_path):
    model = nn.Linear(2, 2)
    ema = PostHocEMA(model, tmp_path, every=0.1, snapshot_every=0.5, clock="epochs")
    assert all(ema.update(tenth / 10) for tenth in range(1, 41))
    assert sorted({s.step for s in find_snapshots(tmp_path)}) == [0.5 * n for n in range(1, 9)]
    rare = PostHocEMA(model, tmp_path / "rare", every=0.3)
    assert [tenth for tenth in range(1, 31) if rare.update(tenth / 10)] == [*range(3, 31, 3)]


def test_a_single_width_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="wanted two or more different ones"):
        PostHocEMA(nn.Linear(2, 2), tmp_path, 0.1)
