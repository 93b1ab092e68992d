"""What a script starts in other processes runs in this one, as rank 0."""

import multiprocessing
from pathlib import Path
from textwrap import dedent

import pytest
import torch.distributed as dist

from memlab.scripts.launch import launch_of
from memlab.scripts.running import run
from memlab.world.isolation import RefusedProcessError
from memlab.world.started import NoAnswerError

LOOP = """
    import os, subprocess, sys, torch
    import torch.multiprocessing as mp
    import torch.distributed as dist

    def train(rank=0, world=1, setup=False, steps=3):
        if setup:
            dist.init_process_group("nccl", rank=rank, world_size=world)
        model = torch.nn.Linear(64, 64).to(f"cuda:{rank}")
        if setup:
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(32, 64, device=f"cuda:{rank}")).sum().backward()
            optimizer.step()
        raise SystemExit("not reached")

    def number(of):
        return os.getpid()

    def work(queue):
        queue.put(os.getpid())

    if __name__ == "__main__":
    """
WEIGHTS = 4 * 64 * 65


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """Run a script with this main part."""
    monkeypatch.chdir(tmp_path)

    def ran(main, *words, **settings):
        body = dedent(main).strip().replace("\n", "\n    ")
        Path("train.py").write_text(f"{dedent(LOOP)}    {body}\n")
        return run(launch_of([*words, "train.py"]), **settings)

    yield ran
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_spawn_runs_rank_0_here(outcome):
    found = outcome("mp.spawn(train, args=(2, True), nprocs=2)")
    assert (found.steps, found.ranks) == (2, 2)
    assert found.trace.at_peak["optimizer_state"] == 2 * WEIGHTS
    bias = 4 * 64  # at the peak, a copy of its gradient is read for the weight's
    assert found.trace.at_peak["gradients"] == WEIGHTS - bias


def test_the_buckets_of_ddp_are_no_inputs(outcome):
    found = outcome("mp.spawn(train, args=(2, True), nprocs=2)").trace
    [bucket] = [
        event
        for event in found.alive()
        if event.bytes == WEIGHTS
        and event.line is None
        and event.category not in ("parameters", "gradients", "optimizer_state")
    ]
    assert bucket.category == "workspace"


def test_the_script_finds_as_many_gpus_as_are_asked_for(outcome):
    main = """
        world = torch.cuda.device_count()
        assert world == torch.accelerator.device_count() == 4
        mp.start_processes(train, (world, True), world)
        """
    assert outcome(main, gpus=4).ranks == 4


def test_torchruns_ranks_each_have_a_gpu(outcome):
    found = outcome(
        'train(0, int(os.environ["WORLD_SIZE"]), True) if torch.cuda.device_count() == 2 else 1',
        *("torchrun", "--nproc_per_node=2"),
    )
    assert (found.steps, found.ranks) == (2, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_started_process_trains_here(outcome, method):
    main = f"""
        model = torch.nn.Linear(4, 4).share_memory()
        context = mp.get_context("{method}")
        started = [context.Process(target=train, args=(0, 2)) for _ in range(2)]
        for process in started: process.start()
        for process in started: process.join()
        """
    found = outcome(main)
    assert (found.steps, found.ranks) == (2, None)


@pytest.mark.few(1)
@pytest.mark.parametrize("wait", ["process.is_alive()", "1", "assert process.exitcode == 0"])
def test_a_process_runs_when_the_script_waits_for_it(outcome, wait):
    main = f"""
        queue = mp.Queue()
        process = mp.Process(target=work, args=(queue,))
        process.start()
        {wait}
        assert queue.get() == os.getpid()
        process.join()
        train()
        """
    assert outcome(main).steps == 2


def test_a_process_that_nobody_waits_for_runs_at_the_end(outcome):
    assert outcome("mp.Process(target=train).start()").steps == 2


def test_a_processs_error_is_the_scripts(outcome):
    with pytest.raises(ZeroDivisionError):
        outcome("mp.Process(target=lambda: 1 / 0).start()")


def test_workers_of_a_pool_start(outcome):
    """A library's own functions run there, and call the script's."""
    main = """
        with mp.Pool(2) as pool:
            assert os.getpid() not in pool.map(number, range(4))
        train()
        """
    assert outcome(main).steps == 2


def test_a_launchers_other_ranks_have_ended(outcome):
    main = """
        environment = {**os.environ, "LOCAL_RANK": "1"}
        other = subprocess.Popen([sys.executable, "train.py"], env=environment)
        assert (other.poll(), other.wait()) == (0, 0)
        train()
        """
    assert outcome(main).steps == 2


def test_another_program_is_refused(outcome):
    with pytest.raises(RefusedProcessError):
        outcome('subprocess.run([sys.executable, "-c", "1"])')


def test_a_mesh_starts_the_process_group(outcome):
    main = """
        mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
        assert mesh["tensor"].size() == 2 and mesh.get_coordinate() in ([0, 0], (0, 0))
        train()
        """
    found = outcome(main, *("torchrun", "--nproc-per-node", "4"))
    assert (found.steps, found.ranks) == (2, 4)
    assert not dist.is_initialized()


@pytest.mark.few(1)
@pytest.mark.parametrize("version", ["one", "two"])
def test_fsdp_has_its_share_of_weights_and_states(outcome, version):
    main = f"""
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        dist.init_process_group("nccl")
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)])
        if "{version}" == "one":
            model = FullyShardedDataParallel(model, device_id=0)
        else:
            for layer in model: fully_shard(layer)
            fully_shard(model.cuda())
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    found = outcome(main, *("torchrun", "--nproc-per-node", "4")).trace
    mine = 4 * (4 * 64 * 64) // 4
    ended = [event for event in found.alive() if event.category == "optimizer_state"]
    assert sum(event.bytes for event in ended if event.bytes > 4) == 2 * mine
    kept = [event.bytes for event in found.alive() if event.category == "parameters"]
    assert sum(kept) == mine


# Each begins with a Process's function; `parent` waits for an answer.
WORKERS = {
    "a pipe with commands": """
        def act(pipe):
            while True:
                command = pipe.recv()
                if command == "close": return
                pipe.send([command, os.getpid()] * 10_000)

        def parent():
            own, theirs = mp.Pipe()
            mp.Process(target=act, args=(theirs,)).start()
            for command in (1, 2):
                own.send(command)
                answer = own.recv()
                assert answer[0] == command and answer[1] != os.getpid()
            own.send("close")
        """,
    "a pipe with data": """
        def act(pipe):
            while True: pipe.send([0] * 10_000)

        def parent():
            own, theirs = mp.Pipe()
            mp.Process(target=act, args=(theirs,)).start()
            assert [len(own.recv()) for _ in range(9)] == [10_000] * 9
        """,
    "a full queue": """
        def act(queue):
            while True: queue.put(os.getpid())

        def parent():
            queue = mp.Queue(4)
            mp.Process(target=act, args=(queue,)).start()
            assert {queue.get() for _ in range(9)} != {os.getpid()}
        """,
    "two queues": """
        def act(free, full):
            while True: full.put(free.get())

        def parent():
            free, full = mp.SimpleQueue(), mp.SimpleQueue()
            mp.Process(target=act, args=(free, full)).start()
            for number in range(9):
                free.put(number)
                assert full.get() == number
        """,
    "a queue that is asked again and again": """
        def act(queue, answers):
            while True:
                try: answers.put(queue.get(timeout=0.001))
                except Exception: continue

        def parent():
            queue, answers = mp.Queue(), mp.Queue()
            mp.Process(target=act, args=(queue, answers)).start()
            for number in range(3):
                queue.put(number)
                assert answers.get() == number
        """,
    "an event": """
        def act(begin, end):
            begin.wait()
            end.set()

        def parent():
            begin, end = mp.Event(), mp.Event()
            process = mp.Process(target=act, args=(begin, end))
            process.start()
            assert not end.wait(0)
            begin.set()
            end.wait()
            process.join()
        """,
    "sleep until a number changes": """
        def act(number):
            number.value += 1

        def parent():
            import time
            number = mp.Value("i", 0)
            mp.Process(target=act, args=(number,)).start()
            while not number.value: time.sleep(0.001)
        """,
    "sleep until an event": """
        def act(stop, number):
            import time
            while not stop.is_set(): number.value += 1; time.sleep(0.001)

        def parent():
            stop, number = mp.Event(), mp.Value("i", 0)
            process = mp.Process(target=act, args=(stop, number))
            process.start()
            assert process.is_alive()
            stop.set()
            process.join()
            assert number.value
        """,
    "a barrier": """
        def act(barrier):
            barrier.wait()

        def parent():
            barrier = mp.Barrier(2)
            process = mp.Process(target=act, args=(barrier,))
            process.start()
            barrier.wait()
            process.join()
        """,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WORKERS)
def test_a_worker_of_the_script_answers_however_it_is_asked(tmp_path, monkeypatch, way):
    monkeypatch.chdir(tmp_path)
    functions = dedent(LOOP).partition("if __name__")[0] + dedent(WORKERS[way])
    Path("train.py").write_text(f"{functions}\nparent()\ntrain()\n")
    assert run(launch_of(["train.py"])).steps == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "wait",
    [
        "mp.Queue().get()",
        "mp.SimpleQueue().get()",
        "ends = mp.Pipe(); ends[0].recv()",
        "ends = mp.Pipe(); ends[0].poll(None)",
        "mp.Event().wait()",
        "queue = mp.Queue(1); queue.put(1); queue.put(2)",
        "mp.spawn(lambda rank, queue: queue.get(), args=(mp.Queue(),), nprocs=2)",
    ],
)
def test_a_wait_that_no_process_can_end_is_an_error(outcome, wait):
    with pytest.raises(NoAnswerError, match="no process is left to send"):
        outcome(wait)


def test_a_loop_that_waits_for_a_message_in_vain_is_an_error(outcome):
    main = """
        queue = mp.Queue()
        while True:
            try: queue.get_nowait()
            except Exception: continue
        """
    with pytest.raises(NoAnswerError):
        outcome(main)


def test_no_process_of_the_script_is_left(outcome):
    main = """
        own, theirs = mp.Pipe()
        mp.Process(target=theirs.recv).start()
        own.send(1)
        started = mp.Process(target=theirs.recv)
        started.start()
        own.send(2)
        train()
        """
    assert outcome(main).steps == 2
    assert multiprocessing.active_children() == []
