"""NCCL's buffers by formula, against the sizes in its log and what users reported."""

import pytest

from memlab.configs import nccl
from memlab.configs.gpus import GIB, MIB

RECEIVER, SENDER = 10_485_760, 2_097_152  # both sizes in NCCL's log on 8 H100s (NVIDIA/nccl #1685)
GROWTH = 4.34e9 - 1.06e9  # of each GPU, by the report's first all-to-all


def test_a_connection_allocates_the_two_sizes_of_nccls_log():
    assert nccl.connection_bytes() == RECEIVER + SENDER


def test_a_smaller_buffer_leaves_those_of_the_other_protocols():
    assert nccl.connection_bytes(MIB) == 8 * MIB + SENDER  # 1 + 0.5 + 4.69, rounded up to 2 MiB


def test_all_to_all_explains_most_of_the_reported_growth_and_no_more():
    by_formula = nccl.all_to_all_bytes(32, gpus=8)
    assert f"{by_formula / GIB:.2f}" == "2.62"
    assert 0.8 < by_formula / GROWTH < 1


def test_rings_are_less_than_what_a_first_all_reduce_was_reported_to_take():
    least, most = map(nccl.ring_bytes, nccl.CHANNELS)
    assert (least, most) == (24 * MIB, 384 * MIB)
    assert most < min(nccl.REPORTED_BYTES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nccl.ring_bytes(0), "got channels=0; give at least 1"),
        (lambda: nccl.all_to_all_bytes(2, 0), "got gpus=0; give at least 1"),
        (lambda: nccl.connection_bytes(0), "got a buffer of 0 bytes; give NCCL_BUFFSIZE"),
    ],
)
def test_impossible_counts_are_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
