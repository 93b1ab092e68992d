"""A dry run of one rank has the bytes of the same rank among real ones."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.pipelining  # as in in_ranks.py

from memlab.allocator import simulate
from memlab.scripts.launch import launch_of
from memlab.scripts.ranks import run_ranks as dry_ranks
from memlab.world.messages import NotYetSentError
from memlab.zero.launch import run_ranks as real_ranks
from tests.quick import quick

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "parallel"
IN_RANKS = Path(__file__).with_name("in_ranks.py")
OF_TWO = (
    *("ddp", "fsdp2", "fsdp2_mixed", "fsdp2_kept", "tensor", "sequence"),
    *("gpipe", "one_f_one_b", "interleaved", "context"),
)
OF_FOUR = ("hybrid", "two_d", "one_f_one_b", "context")
pytestmark = pytest.mark.filterwarnings("ignore")


def path_of(name):
    return str(SCRIPTS / f"{name}.py")


def assert_real(name, ranks, wanted):
    """Run real ranks. gloo's threads may hold a tensor a moment longer, and then they run again."""
    for _ in range(3):
        found = real_ranks(f"{IN_RANKS}:peak", ranks, path_of(name), timeout=100)
        if found == wanted:
            return
    assert found == wanted


def predicted(name, ranks, ranks_run=()):
    launch = launch_of(["torchrun", f"--nproc-per-node={ranks}", path_of(name)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dry_ranks(launch, ranks_run, device="cpu")


def peaks(outcomes):
    return [dict(outcome.trace.at_peak) for outcome in outcomes.values()]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick(["fsdp2", "one_f_one_b", "context"], OF_TWO))
def test_each_of_two_ranks_has_the_bytes_of_the_real_one(name):
    assert_real(name, 2, peaks(predicted(name, 2, (0, 1))))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_each_of_four_ranks_has_the_bytes_of_the_real_one(name):
    assert_real(name, 4, peaks(predicted(name, 4, range(4))))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ran"), [("ddp", [0]), ("one_f_one_b", [0, 1, 2])])
def test_all_stages_of_a_pipeline_run_and_one_rank_of_others(name, ran):
    assert list(predicted(name, 3)) == ran


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "ranks", "sent"),
    [
        # weights of 256 · 512 + 512 and 512 · 256 + 256 elements; each half of the ring sends them
        ("ddp", 2, {"all-reduce": 4 * (2 * 256 * 512 + 768)}),
        # four layers, gathered twice (the last one's weights are kept), and reduced once
        (
            "fsdp2",
            2,
            {
                "all-gather": 8 * 2 * (2 * 256 * 512 + 768),
                "reduce-scatter": 4 * 2 * (2 * 256 * 512 + 768),
            },
        ),
        # the outputs of four layers in forward, the inputs' gradients of three in backward
        ("tensor", 2, {"all-reduce": 7 * 4 * 32 * 256}),
        # rank 0 sends four micro-batches of 8 rows, and receives their gradients
        ("one_f_one_b", 2, {"send": 4 * 32 * 256, "receive": 0}),
    ],
)
def test_what_a_rank_sends_is_that_of_a_ring(name, ranks, sent):
    found: dict[str, int] = {}
    for transfer in predicted(name, ranks, (0,))[0].transfers:
        found[transfer.kind] = found.get(transfer.kind, 0) + transfer.bytes
    assert found == sent


def test_fsdp2s_streams_have_pools_of_their_own_on_a_gpu(tmp_path):
    script = tmp_path / "train.py"
    on_cpu = Path(path_of("fsdp2")).read_text(encoding="utf-8")
    script.write_text(
        on_cpu.replace("gloo", "nccl")
        .replace('mesh("cpu"', 'mesh("cuda"')
        .replace("512", "4096")
        .replace("torch.randn(32, 256)", "torch.randn(32, 256, device='cuda')")
        .replace("optimizer = ", "model.cuda()\noptimizer = ")
    )
    launch = launch_of(["torchrun", "--nproc-per-node=2", str(script)])
    trace = dry_ranks(launch, (0,), device="cuda:h100")[0].trace
    streams = {
        category: {event.stream for event in trace.events if event.category == category}
        for category in ("parameters", "gradients")
    }
    assert streams["parameters"] == {0}
    assert len(streams["gradients"] - {0}) == 1  # their shards: reduce-scatter's stream
    together = replace(
        trace,
        events=tuple(event._replace(stream=0) for event in trace.events),
        history=tuple(event._replace(stream=0) for event in trace.history),
    )
    assert trace.reserved_bytes > simulate(together).reserved_bytes


def test_ranks_that_wait_for_each_other_are_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "got = [None]\n"
        "dist.recv_object_list(got, src=1 - dist.get_rank())\n"
    )
    with pytest.raises(NotYetSentError, match="which has not run"):
        dry_ranks(launch_of(["torchrun", "--nproc-per-node=2", str(script)]), device="cpu")


@pytest.mark.slow
def test_objects_arrive_as_they_were_sent(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank, size = dist.get_rank(), dist.get_world_size()\n"
        "if rank:\n"
        "    got = [None, None]\n"
        "    dist.recv_object_list(got, src=rank - 1)\n"
        "    assert got == [rank - 1, 'x']\n"
        "if rank + 1 < size:\n"
        "    dist.send_object_list([rank, 'x'], dst=rank + 1)\n"
        "everyones = [None] * size\n"
        "dist.all_gather_object(everyones, {'rank': rank})\n"
        "assert everyones == [{'rank': rank}] * size\n"
        "found = [rank, {'lr': 1} if rank == 0 else None]\n"
        "dist.broadcast_object_list(found, src=0)\n"
        "assert found == [0, {'lr': 1}]\n"
        "parts = [None]\n"
        "dist.scatter_object_list(parts, list(range(size)), src=0)\n"
        "assert parts == [rank]\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(2):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    launch = launch_of(["torchrun", "--nproc-per-node=3", str(script)])
    assert list(dry_ranks(launch, (2,), device="cpu")) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "ran"),
    [
        ("512", {0: (), 1: (2, 3), 4: ()}),
        ("512 * (1 + rank // 2 % 2)", {0: (), 1: (), 2: (3,), 4: ()}),
    ],
)
def test_of_stages_with_the_same_weights_the_first_runs(tmp_path, width, ran):
    script = tmp_path / "train.py"
    text = Path(path_of("one_f_one_b")).read_text("utf-8")
    script.write_text(text.replace("n_microbatches=4", "n_microbatches=8").replace("512", width))
    launch = launch_of(["torchrun", "--nproc-per-node=5", str(script)])
    found, each = (dry_ranks(launch, ranks, device="cpu") for ranks in ((), range(5)))
    assert {rank: outcome.alike for rank, outcome in found.items()} == ran
    assert peaks(found) == [peaks(each)[rank] for rank in ran]
    for outcome in found.values():
        others = [each[other].trace.peak_bytes for other in outcome.alike]
        assert outcome.trace.peak_bytes >= max(others, default=0)


@pytest.mark.slow
def test_all_ranks_of_an_interleaved_pipeline_run():
    """Rank 1 has a narrow and a wide stage, rank 2 a wide and a narrow one of the same weights."""
    assert list(predicted("interleaved", 4)) == [0, 1, 2, 3]


@pytest.mark.skipif(torch.__version__ < "2.15", reason="needs torch ≥ 2.15: the setting is new")
def test_a_pipeline_with_a_communicator_for_each_edge_has_the_bytes_of_one_with_one(monkeypatch):
    with_one = peaks(predicted("one_f_one_b", 2, (0, 1)))
    monkeypatch.setattr("torch.distributed.config.pipeline_per_edge_p2p", True)
    assert peaks(predicted("one_f_one_b", 2, (0, 1))) == with_one


@pytest.mark.slow
def test_ranks_that_send_among_many_are_followed_from_peer_to_peer(monkeypatch):
    monkeypatch.setattr("memlab.scripts.ranks.MOST_STAGES", 3)
    assert list(predicted("one_f_one_b", 4)) == [0, 1, 2, 3]


TRAINING = """
import torch
SETUP
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
PREPARE
for _ in range(3):
    model(torch.randn(64, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BY_ACCELERATE = {
    "SETUP": "from accelerate import Accelerator; accelerator = Accelerator()",
    "PREPARE": "optimizer = torch.optim.AdamW(model.parameters())\n"
    "model, optimizer = accelerator.prepare(model, optimizer)",
}
BY_HAND = {
    "SETUP": "torch.distributed.init_process_group('nccl'); torch.cuda.set_device(0)",
    "PREPARE": "torch.distributed.fsdp.fully_shard(model.cuda())\n"
    "optimizer = torch.optim.AdamW(model.parameters())",
}


def test_accelerates_fsdp2_has_the_bytes_of_fully_shard(tmp_path, monkeypatch):
    launching = pytest.importorskip("accelerate.commands.launch")
    monkeypatch.setattr(launching, "default_config_file", str(tmp_path / "none.yaml"))
    monkeypatch.chdir(tmp_path)

    def trace(line, parts):
        source = TRAINING
        for name, code in parts.items():
            source = source.replace(name, code)
        Path("train.py").write_text(source)
        return dry_ranks(launch_of(line.split()), (0,))[0].trace

    options = "--num_processes 4 --use_fsdp --fsdp_version 2"
    ours = trace(f"accelerate launch {options} train.py", BY_ACCELERATE)
    own = trace("torchrun --nproc-per-node 4 train.py", BY_HAND)
    assert (ours.at_peak, ours.reserved_bytes) == (own.at_peak, own.reserved_bytes)
