"""bitsandbytes' paged optimizers: their state is in managed memory, outside torch's allocator."""

import pytest
import torch
from torch import nn

import memlab

bitsandbytes = pytest.importorskip("bitsandbytes")
WIDTH = 512  # 262,144 weights; state is paged from 100,000 on
WEIGHTS = WIDTH * WIDTH
KINDS = {"AdamW8bit": 2, "AdamW32bit": 8, "AdamW": 8, "Lion8bit": 1, "AdEMAMix8bit": 3}  # bytes


def predicted(kind, width=WIDTH):
    def build():
        model = nn.Linear(width, width, bias=False).cuda()
        optimizer = getattr(bitsandbytes.optim, kind)(model.parameters())
        x = torch.ones(4, width, device="cuda")

        def step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step, model, optimizer

    return memlab.predict(build)


def paged_notes(trace):
    return [note for note in trace.notes if "paged" in note]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_paged_state_is_not_on_the_device_and_a_note_has_its_bytes(kind):
    plain, paged = predicted(kind), predicted(f"Paged{kind}")
    num_bytes = KINDS[kind] * WEIGHTS
    assert plain.at_peak["optimizer_state"] - paged.at_peak.get("optimizer_state", 0) == num_bytes
    assert plain.peak_bytes - paged.peak_bytes == num_bytes
    [note] = paged_notes(paged)
    assert note.startswith(f"not counted: {num_bytes / 2**20:.2f} MiB") or num_bytes < 2**20
    assert paged_notes(plain) == []


def test_the_state_of_small_weights_is_not_paged():
    paged = predicted("PagedAdamW8bit", width=300)
    assert paged.peak_bytes == predicted("AdamW8bit", width=300).peak_bytes
    assert paged_notes(paged) == []


def test_the_library_is_unchanged_after_a_paged_step():
    functional = bitsandbytes.functional
    kept = functional.GlobalPageManager.get_instance().paged_tensors
    before = functional.get_paged, functional.fill, functional.prefetch_tensor, list(kept)
    predicted("PagedAdamW8bit")
    after = functional.get_paged, functional.fill, functional.prefetch_tensor, kept
    assert after == before
