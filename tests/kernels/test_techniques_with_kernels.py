"""A kernel is chosen from outside, by the command line too, and what is trained stays the same."""

from dataclasses import replace

import pytest
import torch

from memlab import kernels
from memlab.cli import choices, doctor
from memlab.cli.choices import choose_techniques
from memlab.cli.errors import UsageError
from memlab.cli.measure import measure_techniques
from memlab.cli.requests import Request
from memlab.cli.train import train
from memlab.kernels import launching
from memlab.model import GPTConfig
from memlab.train import Setting, build, combined, dry_trace, techniques_with_kernels

# 8-bit moments are of weights with at least 4,096 numbers: those of the MLP here.
SETTING = Setting(GPTConfig(256, 32, layers=1, heads=4, kv_heads=2, hidden=128, seq_len=32), 2, 32)
BY_KERNEL = {name: combined(name, kernels=True) for name in techniques_with_kernels()}
AT_RANDOM = {"int4-activations": 0.3}  # of the gradients' largest: other draws of the same odds


def after_two_steps(technique):
    """The losses of two steps, the first step's gradients, and the weights at the end."""
    losses = []
    training = build(SETTING, technique, on_loss=lambda loss: losses.append(loss.item()))
    training.step()
    gradients = torch.cat([w.grad.flatten() for w in training.model.parameters()])
    training.step()
    weights = torch.cat([w.detach().flatten() for w in training.model.parameters()])
    return losses, gradients, weights


def test_every_technique_with_a_kernel_has_its_row():
    twins = {name for name in dir(kernels) if not name.startswith("_")}
    assert {"Adam8bit", "Lion8bit", "flash_attention", "chunked_cross_entropy"} < twins
    assert set(BY_KERNEL) == {
        *("selective-checkpointing", "flash-attention", "chunked-loss"),
        *("int8-activations", "int4-activations", "adam8bit", "lion8bit"),
    }


@pytest.mark.parametrize("name", BY_KERNEL)
def test_a_row_by_a_kernel_trains_as_the_readable_one(name):
    losses, gradients, weights = after_two_steps(BY_KERNEL[name])
    wanted_losses, wanted_gradients, wanted_weights = after_two_steps(combined(name))
    assert losses == pytest.approx(wanted_losses, abs=0.05 if name in AT_RANDOM else 1e-5)
    off = (gradients - wanted_gradients).abs().max() / wanted_gradients.abs().max()
    assert off < AT_RANDOM.get(name, 1e-5)
    if name not in AT_RANDOM:
        assert (weights - wanted_weights).abs().max() < 1e-5


# What finds a code without a kernel: counts for 2¹⁶ upper halves of a float32, and 256 thresholds.
TABLE_BYTES = 2**16 + 4 * 256
THRESHOLD_BYTES = 4 * 255


@pytest.mark.parametrize(("name", "codes"), [("adam8bit", 2), ("lion8bit", 1)])
def test_an_optimizers_kernel_keeps_the_same_but_for_the_tables(name, codes):
    by_kernel, readable = dry_trace(SETTING, BY_KERNEL[name]), dry_trace(SETTING, combined(name))
    wanted = dict(readable.at_end)
    wanted["optimizer_state"] -= codes * (TABLE_BYTES - THRESHOLD_BYTES)
    assert by_kernel.at_end == wanted
    assert by_kernel.peak_bytes <= readable.peak_bytes


def test_attentions_kernel_keeps_the_same_and_takes_no_more():
    by_kernel, readable = (
        dry_trace(SETTING, combined("flash-attention", kernels=k)) for k in (True, False)
    )
    assert by_kernel.at_end == readable.at_end
    assert by_kernel.peak_bytes <= readable.peak_bytes


def test_kernels_combine_with_other_techniques():
    names = "checkpointing+flash-attention+chunked-loss+lion8bit"
    by_kernel = combined(names, kernels=True)
    assert by_kernel.attention is kernels.flash_attention
    assert by_kernel.loss is kernels.chunked_cross_entropy
    losses, gradients, _ = after_two_steps(by_kernel)
    wanted_losses, wanted_gradients, _ = after_two_steps(combined(names))
    assert losses == pytest.approx(wanted_losses, abs=1e-5)
    assert (gradients - wanted_gradients).abs().max() < 1e-5 * wanted_gradients.abs().max()


def test_the_command_line_takes_kernels_where_it_is_told_to():
    chosen = choose_techniques(Request(techniques=("flash-attention",), kernels=True))[
        "flash-attention"
    ]
    assert chosen.attention is kernels.flash_attention
    plain = choose_techniques(Request(techniques=("flash-attention",)))["flash-attention"]
    assert plain.attention is combined("flash-attention").attention


def measure(folder, **options):
    """`memlab measure --kernels`."""
    return measure_techniques(Request(model="tiny", out=str(folder), kernels=True, **options))


def test_measure_shows_them(tmp_path, capsys):
    assert (
        measure(tmp_path, techniques=("flash-attention",), batch=1, seq_len=16, device="cpu") == 0
    )
    assert "Triton kernels: flash-attention\n" in capsys.readouterr().out


def test_it_is_said_where_no_technique_has_a_kernel():
    assert choices.list_kernels(["plain", "lora+sgd"]).endswith("no technique here has one")
    assert choices.list_kernels(["lora+adam8bit"]) == "Triton kernels: adam8bit"


def test_a_dry_run_shows_them_without_gpu_or_interpreter(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    assert measure(tmp_path, techniques=("adam8bit",), dry=True, device="cuda") == 0
    assert "adam8bit" in capsys.readouterr().out


REFUSED = "got --kernels on cpu; Triton kernels run on CUDA only: leave --kernels out"


def test_measure_refuses_kernels_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    with pytest.raises(UsageError, match=REFUSED):
        measure(tmp_path, techniques=("adam8bit",), device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_train_refuses_kernels_without_a_gpu(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    asked = Request(model="tiny", techniques=("adam8bit",), device="cpu", kernels=True)
    with pytest.raises(UsageError, match=REFUSED):
        train(asked, steps=1, memory=None)


def test_kernels_without_triton_are_refused_with_what_to_do(monkeypatch):
    def missing(names, *, kernels):
        raise ImportError("memlab.kernels needs Triton, and there is none")

    monkeypatch.setattr(choices, "combined", missing)
    with pytest.raises(UsageError, match=r"got --kernels: memlab.kernels needs Triton"):
        choose_techniques(Request(techniques=("adam8bit",), kernels=True))


def test_the_doctor_tries_the_kernels_where_there_is_cuda(monkeypatch):
    said = "every technique with a Triton kernel works on cpu"
    assert doctor._kernels_work("cpu") == said
    monkeypatch.setattr(launching, "INTERPRETED", False)
    with pytest.raises(
        RuntimeError, match=r"not all work on cpu: flash-attention .*got tensors on cpu"
    ):
        doctor._kernels_work("cpu")


def test_selective_checkpointing_keeps_what_attentions_kernel_gives():
    names = "selective-checkpointing+flash-attention"

    def kept(plugs):
        return dry_trace(SETTING, plugs).at_peak["activations"]

    by_kernel, readable = combined(names, kernels=True), combined(names)
    unaware = replace(readable, attention=kernels.flash_attention)
    assert kept(by_kernel) == kept(readable) > kept(unaware)
