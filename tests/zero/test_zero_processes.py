"""ZeRO in real processes: compared with the simulation and FSDP2, and with failing ranks.

One launch serves many tests, which read its results (tests/zero/in_ranks.py).
"""

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from close import assert_close
from in_ranks import (
    CASES,
    HOW,
    SAVED,
    STAGES,
    Fickle,
    Wide,
    autocast_sum,
    inputs_of,
    mean_square,
)
from quick import slow
from ranked import (
    TIED,
    OneProcess,
    adamw,
    differing,
    micro_batches,
    model_of,
    sum_of_losses,
    two_groups,
)

import memlab
from memlab.model import GPT
from memlab.zero import processes, simulate
from memlab.zero.joining import Note, explain
from memlab.zero.launch import RanksFailed, run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

ROOT = Path(__file__).parents[2]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
IN_RANKS = str(Path(__file__).with_name("in_ranks.py"))
TIME_OUT = 300  # generous: the machine may be busy
FLOAT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def two(folder):
    return run_ranks(f"{IN_RANKS}:two_ranks", 2, folder, timeout=TIME_OUT)


@pytest.fixture(scope="module")
def four(two, folder):
    return run_ranks(f"{IN_RANKS}:four_ranks", 4, folder, timeout=TIME_OUT)


@pytest.fixture(params=["two", slow("four")])
def beside(request):
    return [rank["beside"] for rank in request.getfixturevalue(request.param)]


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Return (the error, the notes of each rank) of three ranks; rank 1 is killed in the end."""
    folder = tmp_path_factory.mktemp("failures")
    with pytest.raises(RanksFailed) as failed:
        run_ranks(f"{IN_RANKS}:failures", 3, str(folder), timeout=TIME_OUT)
    return failed, [ast.literal_eval((folder / f"{rank}.txt").read_text()) for rank in range(3)]


def assembled(by_rank, model):
    """Join the chunks of all ranks to whole weights, and check that no element is missing."""
    found = {}
    for name, weight in model.named_parameters():
        dtypes = [chunk.dtype for of in by_rank for key, chunk in of.items() if key[0] == name]
        flat = torch.full((weight.numel(),), torch.nan, dtype=dtypes[0])
        for of in by_rank:
            for (owner, start), chunk in of.items():
                if owner == name:
                    flat[start : start + len(chunk)] = chunk
        assert not flat.isnan().any(), name
        found[name] = flat.view(weight.shape)
    return found


def simulated(stage, overlap, model, ranks=2, optimizer=adamw, **settings):
    by_unit = True if overlap and stage < 2 else None
    given = optimizer(two_groups(model))
    return simulate(model, given, ranks, stage, by_unit=by_unit, **settings)


# ------------------------------------------------------------------ comparison with the simulation


@cache
def metered(stage, overlap):
    zero = simulated(stage, overlap, model_of(), meter=memlab.meter)
    for number in range(2):
        step = zero.step(micro_batches(2, seed=number), sum_of_losses)
    return zero.weights(), step


@pytest.mark.few(1)
@pytest.mark.parametrize("how", HOW)
def test_two_ranks_have_the_weights_of_the_simulation_bit_for_bit(two, how):
    """All ranks start from rank 0's values, although rank 1's model has other ones."""
    found = assembled([rank["metered"][how]["weights"] for rank in two], model_of())
    expected, step = metered(*how)
    assert differing(found, expected) == []
    assert {rank["metered"][how]["loss"] for rank in two} == {(step.loss, step.tokens)}


@pytest.mark.parametrize("how", HOW)
def test_each_rank_sends_what_the_simulation_sends(two, how):
    _, step = metered(*how)
    for rank, traffic in zip(two, step.traffic, strict=True):
        assert rank["metered"][how]["traffic"] == (traffic,)


@pytest.mark.parametrize("how", HOW)
def test_the_traffic_counters_match_the_calls_of_torch(two, how):
    """Stage 1 would send 1.5× as much if it all-reduced its gradients."""
    for rank in two:
        counted = Counter()
        for collective, calls in rank["metered"][how]["traffic"][0].calls.items():
            counted[collective.kind] += calls if collective.payload != "numbers" else 0
        assert +rank["metered"][how]["calls"] == +counted


def test_stage_3_gathers_a_unit_twice_and_reduce_scatters_it_once(two):
    for overlap in (False, True):
        calls = two[0]["metered"][3, overlap]["calls"]
        units = TIED.layers + 1
        assert +calls == {"all_gather": 2 * units, "reduce_scatter": units}


@pytest.mark.parametrize("how", HOW)
def test_each_rank_stores_what_the_simulation_stores(two, how):
    """Also with overlap: blocks are equal, and the bucket being filled peaks above the pending
    one."""
    _, step = metered(*how)
    for rank, trace in zip(two, step.traces, strict=True):
        held = rank["metered"][how]
        assert held["at_end"] == trace.at_end
        if how != (3, True):
            assert held["peak"] == trace.peak_bytes
            assert held["at_peak"] == trace.at_peak


def wide(stage, overlap):
    model = Wide()
    by_unit = True if overlap and stage < 2 else None
    optimizer = adamw(model.parameters())
    zero = simulate(model, optimizer, 2, stage, by_unit=by_unit, meter=memlab.meter)
    for _ in range(2):
        step = zero.step([torch.randn(1, 6) for _ in range(2)], mean_square)
    return step.traces


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", STAGES)
def test_without_overlap_the_peak_equals_the_simulations(two, stage):
    for rank, trace in zip(two, wide(stage, False), strict=True):
        assert rank["wide"][stage, False]["peak"] == trace.peak_bytes
        assert rank["wide"][stage, False]["at_peak"] == trace.at_peak


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", STAGES)
def test_overlap_costs_a_prefetched_unit_and_a_pending_bucket(two, stage):
    """The peak of stage 3 is in the largest unit's backward.

    The first unit (8 × 6) is prefetched, and the gradients of the last one (500 × 2) are still
    whole. Below stage 3 nothing is prefetched, and the previous reduction has finished by the time
    the next bucket is filled.
    """
    more = FLOAT * (8 * 6 + 500 * 2 - 500 * 2 // 2) if stage == 3 else 0
    for rank, trace in zip(two, wide(stage, True), strict=True):
        assert rank["wide"][stage, True]["peak"] == trace.peak_bytes + more
        assert rank["wide"][stage, True]["at_end"] == trace.at_end


@pytest.mark.few(3)
@pytest.mark.parametrize("how", HOW)
def test_accumulated_and_clipped_steps_agree_within_float64(two, how):
    """Every token counts the same on every rank, and the norm is over all shards."""
    zero, norms = simulated(*how, model_of().double()), []
    for number in range(3):
        step = zero.step(micro_batches(6, seed=number), sum_of_losses, clip_norm=0.1)
        norms.append(step.norm)
    found = assembled([rank["accumulated"][how][0] for rank in two], model_of())
    for name, weight in zero.weights().items():
        assert_close(found[name], weight)
    for rank, traffic in zip(two, step.traffic, strict=True):
        assert rank["accumulated"][how][1] == pytest.approx(norms, rel=1e-12)
        assert rank["accumulated"][how][2] == traffic


@pytest.mark.parametrize("stage", STAGES)
def test_float32_copies_of_bfloat16_step_as_in_the_simulation(two, stage):
    model = model_of(dtype=torch.bfloat16)
    zero = simulated(stage, True, model, master_weights=True)
    for number in range(3):
        zero.step(micro_batches(2, seed=number), sum_of_losses)
    found = assembled([rank["low precision"][stage] for rank in two], model)
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    rounded = {name: weight.bfloat16() for name, weight in found.items()}
    assert differing(rounded, zero.weights()) == []


@pytest.mark.parametrize("stage", STAGES)
def test_autocast_gives_the_weights_of_the_simulation(two, stage):
    zero = simulated(stage, True, model_of())
    for number in range(3):
        zero.step(micro_batches(2, seed=number), autocast_sum)
    found = assembled([rank["autocast"][stage] for rank in two], model_of())
    assert differing(found, zero.weights()) == []


@pytest.mark.parametrize("overlap", [False, True])
def test_unused_prefetches_change_nothing(two, overlap):
    model = Fickle()
    zero = simulate(model, adamw(model.parameters()), 2, 3)
    for number in range(4):
        zero.step(inputs_of(number), mean_square)
    found = assembled([rank["fickle"][overlap][0] for rank in two], model)
    assert differing(found, zero.weights()) == []


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks(two, stage):
    expected = {"stepped": [False, True], "unchanged": [True, False], "scale": 2.0**15}
    assert [rank["scaled"][stage] for rank in two] == [expected] * 2


# ------------------------------------------------------------------ plain training loops


@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_loop_steps_with_the_mean_of_the_ranks_gradients(two, stage):
    alone, norms = OneProcess(model_of().double(), adamw), []
    schedule = torch.optim.lr_scheduler.StepLR(alone.optimizer, 1, 0.5)
    for number in range(3):
        for tokens, targets in micro_batches(2, seed=number):
            (alone.model(tokens, targets.clamp(min=0)) / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(alone.model.parameters(), 0.5)))
        alone.optimizer.step()
        alone.optimizer.zero_grad()
        schedule.step()
    found = assembled([rank["plain"][stage]["weights"] for rank in two], alone.model)
    for name, weight in alone.weights().items():
        assert_close(found[name], weight)
    for rank in two:
        assert rank["plain"][stage]["norms"] == pytest.approx(norms, rel=1e-12)
        assert rank["plain"][stage]["lr"] == alone.optimizer.param_groups[0]["lr"]


def test_no_sync_sends_once_and_steps_the_same_in_stage_1(two):
    model = model_of().double()
    zero = simulated(1, True, model)
    for number in range(2):
        zero.step(micro_batches(4, seed=number), sum_of_losses)
    buckets = len(zero.plan.buckets)
    for sync, sent in ((False, buckets), (True, 2 * buckets)):
        found = assembled([rank["no sync"][sync][0] for rank in two], model)
        for name, weight in zero.weights().items():
            assert_close(found[name], weight)
        assert [rank["no sync"][sync][1] for rank in two] == [sent] * 2


# ------------------------------------------------------------------ errors and failing ranks


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("model", r"rank 1 has \[blocks\.0\.mlp\.gate\.weight 12x12 .* rank 0 has .* 10x12"),
        ("settings", r"rank 1 has \[overlap=False\] where rank 0 has \[overlap=True\]"),
        ("rate", r"rank 1 has \[SGD, group 0: lr=2\.0\] where rank 0 has .*lr=1\.0"),
        ("optimizer", r"Adafactor keeps row_var, which several elements share"),
        ("direct step", r"all ranks have to step together; call zero\.step\(\)"),
        ("no gradients", r"no gradients to step with; call loss\.backward\(\)"),
        ("no loss", r"got micro-batches without sum_of_losses; pass both, or neither"),
        ("micro-batches 2", r"rank 1 has 2 micro-batches where rank 0 has 1; pass the same"),
        ("micro-batches 3", r"rank 1 has 2 micro-batches where rank 0 has 1; pass the same"),
    ],
)
def test_every_rank_gets_an_error_that_shows_the_difference(two, case, words):
    for rank in two:
        assert re.search(words, rank["refused"][case])
    if case != "optimizer":  # the rank with that optimizer raises its own error
        assert two[0]["refused"][case] == two[1]["refused"][case]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("loss", "the loss (nan) of rank 1"),
        ("gradient", "the gradient of blocks.1.mlp_norm.weight of rank 1"),
    ],
)
def test_a_non_finite_value_on_one_rank_raises_the_same_error_on_all(two, stage, where, words):
    """The error comes before the step, and the next step works."""
    said = [rank["not finite"][stage, where] for rank in two]
    assert said[0] == said[1]
    message, fine_afterwards = said[0]
    assert message.startswith(f"not finite: {words}; no rank has stepped")
    assert fine_afterwards


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "rank 1 of 3 stopped before the reduce-scatter of root, with OSError: the disk"),
        ("leaves", "rank 1 of 3 stopped before the reduce-scatter of root, with no error: it has"),
        ("sleeps", "rank 1 of 3 did not arrive in time: the reduce-scatter of root cannot finish"),
        (
            "goes on",
            "the ranks wait for each other, rank 0 in the all-reduce of a scalar, ",
        ),
        ("dies", "rank 1 of 3 died without a message: the reduce-scatter of root cannot finish"),
    ],
)
def test_the_other_ranks_name_a_rank_that_stops_hangs_or_dies(failed, how, words):
    """The ranks fail in one way after another, and join again each time."""
    _, said = failed
    for rank in (0, 2):
        assert said[rank][how].startswith(f"RankLost: {words}")
        if how == "goes on":
            assert "rank 1 in the reduce-scatter of root" in said[rank][how]


@pytest.mark.slow
def test_the_launcher_reports_which_rank_was_killed(failed):
    error, said = failed
    assert str(error.value) == "rank 1 of 3 failed: killed by SIGKILL"
    assert error.value.errors[0] == error.value.errors[2] == "RuntimeError: end of all cases"
    assert said[1]["raises"] == "OSError: the disk is full"
    assert [sorted(said[rank].keys() & CASES.keys()) for rank in (0, 2)] == [sorted(CASES)] * 2


def test_a_rank_that_comes_after_the_others_gave_up_did_not_come_in_time():
    given_up, late = Note("", "the sum", 5.1, True), Note("", "the sum", 0.2)
    notes = {0: given_up, 1: late, 2: given_up._replace(timed_out=False)}
    words = "rank 1 of 3 did not arrive in time: the sum cannot finish"
    assert explain(notes, [0, 1, 2], 3, "the sum", "closed") == words


def test_only_members_of_the_group_can_be_missing():
    notes = {3: Note("", "the sum", 1.0)}
    words = "rank 1 of 4 died without a message: the sum cannot finish"
    assert explain(notes, [1, 3], 4, "the sum", "closed") == words


def test_no_process_and_no_port_remains(two):
    require_gone([rank["where"] for rank in two])


@pytest.mark.slow
def test_no_process_and_no_port_remains_of_failed_ranks(failed):
    """Also while the error is alive, whose traceback references the launcher's frame."""
    _, said = failed
    require_gone([rank["where"] for rank in said])


def require_gone(ranks):
    """Check that neither the processes nor the ports of (pid, port) pairs exist any more."""
    assert len({pid for pid, _ in ranks}) == len(ranks)
    assert [pid for pid, _ in ranks if psutil.pid_exists(pid)] == []
    connections = psutil.Process().net_connections("tcp")
    listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    assert {port for _, port in ranks} & listening == set()


@pytest.mark.slow
def test_torchrun_runs_the_example(tmp_path):
    """Run the example in the module's docstring like a user; its processes end."""
    example = re.search(r"train.py`:\n\n(.*?\n)\n\S", processes.__doc__, re.DOTALL)[1]
    script = tmp_path / "train.py"
    # torchrun starts Python with -u, and `print("pid", pid)` makes several writes.
    # One os.write, because the unbuffered output of two processes could mix within a line.
    pid = r"import os; os.write(1, b'pid %d\n' % os.getpid())"
    script.write_text(f"{textwrap.dedent(example)}{pid}\n")
    ran = subprocess.run(
        [sys.executable, "-m", *TORCHRUN, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": LOOPBACK},
        capture_output=True,
        text=True,
        timeout=TIME_OUT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    [loss] = re.findall(r"^loss (\d+\.\d\d)", ran.stdout, re.MULTILINE)
    assert 5 < float(loss) < 7  # 256 random byte values: about log(256)
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", ran.stdout)]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


# ------------------------------------------------------------------ overlap


def before(events, first, second):
    """Return whether the first event with prefix `first` precedes the one with prefix `second`."""
    places = [next(n for n, e in enumerate(events) if e.startswith(w)) for w in (first, second)]
    return places[0] < places[1]


SENDS = ("begin the all-reduce", "begin the reduce-scatter")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_are_sent_during_backward(two, stage):
    """The last block's gradients are sent before the second block's backward.

    The wait comes after the second block's backward (stage 2, where buckets of one block wait for
    each other) or after the whole backward pass (stages 0 and 1).
    """
    for rank in two:
        events = rank["order"][stage, True]
        sent = f"the {'all-reduce' if stage == 0 else 'reduce-scatter'} of blocks.2"
        assert before(events, f"begin {sent}", "gradient of blocks.1.")
        first = "gradient of blocks.1." if stage == 2 else "gradient of embedding.weight"
        last_wait = max(n for n, event in enumerate(events) if event == f"wait for {sent}")
        assert any(event.startswith(first) for event in events[:last_wait])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_overlap_nothing_is_pending_during_backward(two, stage):
    for rank in two:
        events = rank["order"][stage, False]
        begun = [n for n, event in enumerate(events) if event.startswith(SENDS)]
        assert begun
        if stage == 2:
            assert all(events[n + 1].startswith("wait for the re") for n in begun)
        else:
            last = max(n for n, event in enumerate(events) if event.startswith("gradient of"))
            assert min(begun) > last


@pytest.mark.parametrize("overlap", [False, True])
def test_stage_3_prefetches_the_next_block_only_with_overlap(two, overlap):
    gathered = "begin the all-gather of blocks."
    for rank in two:
        events = rank["order"][3, overlap]
        turn = next(n for n, event in enumerate(events) if event.startswith("gradient of"))
        forward, backward = events[:turn], events[turn:]
        assert before(forward, f"{gathered}1", "forward in blocks.0") == overlap
        assert before(forward, f"{gathered}2", "forward in blocks.1") == overlap
        assert before(backward, f"{gathered}0", "gradient of blocks.1.") == overlap


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("label", SAVED)
def test_the_same_ranks_resume_bit_for_bit(two, label):
    for rank in two:
        went_on, resumed, also = rank["saved"][label]
        assert went_on.keys() == resumed.keys()
        assert all(torch.equal(resumed[key], weight) for key, weight in went_on.items())
        assert also == {"steps": 2}


@pytest.fixture(params=[slow(slice(3)), slow(slice(3, 4))], ids=["three ranks", "one rank"])
def resumed(four, request):
    return [rank["resumed"] for rank in four[request.param]]


@pytest.mark.parametrize("label", SAVED)
def test_other_ranks_resume_in_another_stage_from_the_same_values(two, folder, resumed, label):
    """Moments too: without them the next step would differ by far more than rounding."""
    model = model_of()
    went_on = assembled([rank["saved"][label][0] for rank in two], model)
    at_once, after = (assembled([rank[label][n] for rank in resumed], model) for n in (0, 1))
    prefix = "master" if "bfloat16" in label else "model"
    stored = {f"{prefix}.{name}": torch.empty_like(weight) for name, weight in at_once.items()}
    dcp.load(stored, checkpoint_id=f"{folder}/{label}", no_dist=True)
    assert differing({f"{prefix}.{name}": w for name, w in at_once.items()}, stored) == []
    for name, weight in went_on.items():
        if "bfloat16" in label:  # the gradients' noise decides a step's sign
            assert (after[name] - weight).abs().max() < 1e-3, name
        else:
            assert_close(after[name], weight)


def test_a_failed_load_on_one_rank_raises_the_same_error_on_all(resumed):
    """Only one rank owns the weight of another shape; the other ranks find no problem."""
    [refused] = {rank["refused"] for rank in resumed}
    assert re.match(
        r"ValueError: model\.blocks\.0\.mlp\.\w+\.weight is .*10.* in .* and .*4.* here", refused
    )
    [nothing] = {rank["nothing there"] for rank in resumed}
    assert nothing.startswith("FileNotFoundError: ")
    assert "nothing is not a checkpoint" in nothing


def test_torch_alone_can_load_a_checkpoint_into_a_plain_model(two, folder):
    model = GPT(TIED).double()
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/stage 2", no_dist=True)
    stored = {f"model.{name}": torch.empty_like(w) for name, w in model.named_parameters()}
    dcp.load(stored, checkpoint_id=f"{folder}/stage 2", no_dist=True)
    assert differing({f"model.{n}": w for n, w in model.named_parameters()}, stored) == []
    fresh = model_of().double()
    assert all(not torch.equal(w, stored[f"model.{n}"]) for n, w in fresh.named_parameters())


# ------------------------------------------------------------------ comparison with FSDP2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_equal_fsdp2s_after_ten_clipped_steps(beside, stage):
    found = assembled([rank["ours"][stage] for rank in beside], model_of())
    for name, weight in beside[0]["theirs"].items():
        assert_close(found[name], weight)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float32_gradients_equal_fsdp2s(beside, stage):
    found = assembled([rank["gradients"][1][stage] for rank in beside], model_of())
    for name, gradient in beside[0]["gradients"][0].items():
        error = torch.linalg.vector_norm(found[name] - gradient)
        assert error <= 1e-6 * torch.linalg.vector_norm(gradient), name


def test_it_calls_the_same_collectives_as_fsdp2(beside):
    """Two all-gathers and one reduce-scatter per unit; FSDP2 does not sum scalars."""
    for rank in beside:
        ours = {c.kind: n for c, n in rank["our calls"].items() if c.payload != "numbers"}
        assert ours == {"all_gather": 2 * (TIED.layers + 1), "reduce_scatter": TIED.layers + 1}
        assert rank["their calls"] == {
            "c10d._allgather_base_": ours["all_gather"],
            "c10d._reduce_scatter_base_": ours["reduce_scatter"],
        }


def test_memory_is_fsdp2s_but_for_the_optimizers_counters_and_padding(beside):
    """FSDP2 steps each weight separately, without padding.

    memlab steps adjacent weights of a group in a unit as one tensor, with padding.
    """
    tensors = len(list(model_of().named_parameters()))
    paddings = []
    for rank in beside:
        theirs, ours = (held["at_end"] for held in rank["held"])
        stepped, padding = rank["held"][1]["stepped"], rank["held"][1]["padding"]
        more = FLOAT * (2 * padding - (tensors - stepped))
        expected = {**theirs, "optimizer_state": theirs["optimizer_state"] + more}
        assert {k: ours[k] for k in expected if k != "inputs"} == {
            k: v for k, v in expected.items() if k != "inputs"
        }
        paddings.append(padding)
    assert paddings[0] == 0 < paddings[-1]


def test_its_peak_is_at_most_fsdp2s(beside):
    for rank in beside:
        theirs, ours = rank["held"]
        assert ours["peak"] <= theirs["peak"]
