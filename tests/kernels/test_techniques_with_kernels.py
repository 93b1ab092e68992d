"""Kernels are chosen from outside, also on the command line, and training results stay the same."""

import json
from dataclasses import replace

import pytest
import torch
from close import assert_close

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

# Only the MLP's weights have at least 4,096 elements and get 8-bit moments.
SETTING = Setting(
    GPTConfig(256, 32, layers=1, heads=4, kv_heads=2, intermediate_size=128, seq_len=32), 2, 32
)
WITH_KERNELS = {name: combined(name, kernels=True) for name in techniques_with_kernels()}
STOCHASTIC_ERROR = {"int4-activations": 0.3}  # relative to the largest gradient; random bits differ


def after_two_steps(technique):
    """Return the losses of two steps, the first step's gradients, and the final weights."""
    losses = []
    training = build(SETTING, technique, on_loss=lambda loss: losses.append(loss.item()))
    training.step()
    gradients = torch.cat([w.grad.flatten() for w in training.model.parameters()])
    training.step()
    weights = torch.cat([w.detach().flatten() for w in training.model.parameters()])
    return losses, gradients, weights


def test_every_technique_with_a_kernel_is_registered():
    kernel_names = {name for name in dir(kernels) if not name.startswith("_")}
    assert {"Adam8bit", "Lion8bit", "flash_attention", "chunked_cross_entropy"} < kernel_names
    assert set(WITH_KERNELS) == {
        *("selective-checkpointing", "flash-attention", "chunked-loss"),
        *("int8-activations", "int4-activations", "adam8bit", "lion8bit"),
    }


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_training_with_a_kernel_matches_the_readable_version(name):
    losses, gradients, weights = after_two_steps(WITH_KERNELS[name])
    expected_losses, expected_gradients, expected_weights = after_two_steps(combined(name))
    if name not in STOCHASTIC_ERROR:
        assert losses == pytest.approx(expected_losses, rel=256 * 2**-23)
        assert_close(gradients, expected_gradients)
        assert_close(weights, expected_weights)
        return
    assert losses == pytest.approx(expected_losses, abs=0.05)
    relative_error = (gradients - expected_gradients).abs().max() / expected_gradients.abs().max()
    assert relative_error < STOCHASTIC_ERROR[name]


# Lookup tables without a kernel: 2¹⁶ counts, and 256 thresholds.
TABLE_BYTES = 2**16 + 4 * 256
THRESHOLD_BYTES = 4 * 255


@pytest.mark.parametrize(("name", "codes"), [("adam8bit", 2), ("lion8bit", 1)])
def test_an_optimizer_kernel_has_the_same_state_and_smaller_tables(name, codes):
    with_kernel, readable = (
        dry_trace(SETTING, WITH_KERNELS[name]),
        dry_trace(SETTING, combined(name)),
    )
    expected = dict(readable.at_end)
    expected["optimizer_state"] -= codes * (TABLE_BYTES - THRESHOLD_BYTES)
    assert with_kernel.at_end == expected
    assert with_kernel.peak_bytes <= readable.peak_bytes


def test_the_attention_kernel_saves_the_same_and_peaks_no_higher():
    with_kernel, readable = (
        dry_trace(SETTING, combined("flash-attention", kernels=k)) for k in (True, False)
    )
    assert with_kernel.at_end == readable.at_end
    assert with_kernel.peak_bytes <= readable.peak_bytes


def test_kernels_combine_with_other_techniques():
    names = "checkpointing+flash-attention+chunked-loss+lion8bit"
    with_kernel = combined(names, kernels=True)
    assert with_kernel.attention is kernels.flash_attention
    assert with_kernel.loss is kernels.chunked_cross_entropy
    losses, gradients, _ = after_two_steps(with_kernel)
    expected_losses, expected_gradients, _ = after_two_steps(combined(names))
    assert losses == pytest.approx(expected_losses, rel=256 * 2**-23)
    assert_close(gradients, expected_gradients)


def test_the_command_line_uses_kernels_on_request():
    chosen = choose_techniques(Request(techniques=("flash-attention",), kernels=True))[
        "flash-attention"
    ]
    assert chosen.attention is kernels.flash_attention
    plain = choose_techniques(Request(techniques=("flash-attention",)))["flash-attention"]
    assert plain.attention is combined("flash-attention").attention


def measure(folder, model="tiny", **options):
    """Run `memlab measure --kernels`."""
    return measure_techniques(Request(model=model, out=str(folder), kernels=True, **options))


ONE_LAYER = {
    **{"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4},
    **{"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True},
}


@pytest.mark.slow
def test_measure_shows_kernels(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(ONE_LAYER))
    options = {"batch": 1, "seq_len": 16, "device": "cpu"}
    assert measure(tmp_path, str(config), techniques=("flash-attention",), **options) == 0
    assert "Triton kernels: flash-attention\n" in capsys.readouterr().out


def test_a_message_says_when_no_technique_has_a_kernel():
    assert choices.list_kernels(["plain", "lora+sgd"]).endswith("no technique here has one")
    assert choices.list_kernels(["lora+adam8bit"]) == "Triton kernels: adam8bit"


def test_a_dry_run_needs_no_gpu_or_interpreter(tmp_path, capsys, monkeypatch):
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
    request = Request(model="tiny", techniques=("adam8bit",), device="cpu", kernels=True)
    with pytest.raises(UsageError, match=REFUSED):
        train(request, steps=1, memory=None)


def test_kernels_without_triton_are_refused(monkeypatch):
    def missing(names, *, kernels, adapters):
        raise ImportError("memlab.kernels needs Triton, which is not installed")

    monkeypatch.setattr(choices, "combined", missing)
    with pytest.raises(UsageError, match=r"got --kernels: memlab.kernels needs Triton"):
        choose_techniques(Request(techniques=("adam8bit",), kernels=True))


def test_the_doctor_tries_the_kernels(monkeypatch):
    monkeypatch.setattr(doctor, "SMALL", SETTING)  # in the interpreter, time grows with the sizes
    assert "Triton kernel works on cpu" in doctor._kernels_work("cpu")
    monkeypatch.setattr(launching, "INTERPRETED", False)
    with pytest.raises(
        RuntimeError, match=r"failed on cpu: .*flash-attention .*got tensors on cpu"
    ):
        doctor._kernels_work("cpu")


def test_selective_checkpointing_saves_the_attention_kernels_output():
    names = "selective-checkpointing+flash-attention"

    def activation_bytes(plugs):
        return dry_trace(SETTING, plugs).at_peak["activations"]

    with_kernel, readable = combined(names, kernels=True), combined(names)
    unaware = replace(readable, attention=kernels.flash_attention)
    assert activation_bytes(with_kernel) == activation_bytes(readable) > activation_bytes(unaware)
