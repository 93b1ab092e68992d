"""Device memory of NCCL's buffers, which are no tensors: torch neither allocates nor counts them.

NCCL connects two GPUs of a machine by a *channel* in each direction, and every connection has
buffers of its own: one for each of its three protocols, and a small header on the other side.

    Simple      4 MiB                        NCCL_BUFFSIZE
    LL          8 · 512 · 8 · 16 bytes       512 KiB
    LL128       120 · 640 · 8 · 8 bytes      4.69 MiB

Both allocations are rounded up to 2 MiB: 10 and 2 MiB, the two sizes that NCCL's log showed on 8
H100s (NVIDIA/nccl #1685). A ring has one connection in and one out for each channel. NCCL chooses
the number of channels by GPUs and links. `NCCL_MAX_NCHANNELS` limits it for collectives, and
`NCCL_MAX_P2P_NCHANNELS` for send and receive, which all-to-all uses.

    reported                                            by formula
    all-to-all, 8 × H100, 32 channels: 3.05 GiB more    2.62 GiB, connections alone (#1685)
    all-reduce, 2 and 4 × A100: 544 and 688 MiB         24 to 384 MiB for rings (#964)

The rest are trees, NVLink SHARP, network buffers and kernels: the formulas give the least.

Source   NCCL: src/init.cc (sizes), src/transport/p2p.cc (one allocation on each side), and the
         documentation of NCCL_BUFFSIZE. Each communicator, so most often each process group, has
         its own buffers (#864).
"""

from memlab.configs.gpus import MIB

CHANNELS = 2, 32  # what NCCL was seen to choose: two over PCIe, up to 32 over NVLink
REPORTED_BYTES = 544 * MIB, 688 * MIB  # of a group's first all-reduce on A100s (NVIDIA/nccl #964)

_SIMPLE = 4 * MIB
_LL = 8 * 512 * 8 * 16  # lines per thread · threads · steps · bytes of a line
_LL128 = 120 * 640 * 8 * 8  # elements per thread · threads · steps · bytes of an element
_UNIT = 2 * MIB  # of an allocation that another process maps
_HEADER = 1  # a few kB, but more than nothing: each side rounds up


def connection_bytes(buffsize: int = _SIMPLE) -> int:
    """Return what a GPU allocates for one channel to and from one other GPU.

    `buffsize` is NCCL_BUFFSIZE in bytes.
    """
    if buffsize < 1:
        raise ValueError(f"got a buffer of {buffsize} bytes; give NCCL_BUFFSIZE, such as 4194304")
    receiver = _rounded(_HEADER + buffsize + _LL + _LL128)
    sender = _rounded(_HEADER)
    return receiver + sender


def ring_bytes(channels: int, buffsize: int = _SIMPLE) -> int:
    """Return the least that all-reduce, all-gather and reduce-scatter need on each GPU: a channel
    receives from one neighbor and sends to another."""
    _check(channels=channels)
    return channels * connection_bytes(buffsize)


def all_to_all_bytes(channels: int, gpus: int, buffsize: int = _SIMPLE) -> int:
    """Return the least for all-to-all in one machine: every pair of GPUs is connected."""
    _check(channels=channels, gpus=gpus)
    return (gpus - 1) * channels * connection_bytes(buffsize)


def _rounded(count: int) -> int:
    return -(-count // _UNIT) * _UNIT


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"got {name}={count}; give at least 1")
