"""The drawings of docs/MECHANISMS.md show what memlab computes, and are as their script draws."""

import re
import runpy
from pathlib import Path

import pytest

from memlab.allocator import Allocator, Settings
from memlab.planner.parallel import micro_batches_in_flight
from memlab.zero import model_state_bytes

ROOT = Path(__file__).parents[1]
DRAWINGS = runpy.run_path(str(ROOT / "site" / "drawings.py"))
MIB = 2**20


@pytest.mark.parametrize("name", ["sharding", "tiles", "recompute", "allocator", "pipeline"])
def test_each_drawing_is_the_one_that_its_script_draws(name):
    path = ROOT / "docs" / "drawings" / f"{name}.svg"
    assert path.read_text(encoding="utf-8") == DRAWINGS[name]()


def test_the_drawn_requests_end_with_the_drawn_bytes():
    allocator = Allocator(Settings())
    a, _, c = (allocator.malloc(size * MIB) for size in (6, 8, 6))
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(a)
    allocator.free(c)
    allocator.malloc(8 * MIB)
    drawn = DRAWINGS["allocator"]()
    allocated, reserved = allocator.allocated_bytes // MIB, allocator.reserved_bytes // MIB
    assert f"= {allocated} MiB · reserved 20 + 20 = {reserved} MiB" in drawn


def test_the_drawn_bytes_per_weight_are_those_of_the_formula():
    drawn = DRAWINGS["sharding"]()
    for stage in range(4):
        held = model_state_bytes(
            1000, ranks=4, stage=stage, parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8
        )
        assert f">{held / 1000:g} bytes<" in drawn


@pytest.mark.parametrize("name", ["sharding", "tiles", "recompute", "allocator", "pipeline"])
def test_a_drawing_fits_the_column_of_the_site(name):
    width = int(re.search(r' width="(\d+)" height', DRAWINGS[name]())[1])
    assert width <= 708


def test_a_drawn_stage_saves_as_many_micro_batches_as_the_formula_says():
    for stage in range(4):
        held = most = 0
        for kind, _ in DRAWINGS["one_f_one_b"](stage, 4, 6):
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert most == micro_batches_in_flight(stage, 4, 6)
