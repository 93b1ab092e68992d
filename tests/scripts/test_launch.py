"""Every way to start a script names the same script and arguments."""

from dataclasses import replace

import pytest

from memlab.scripts.launch import Launch, launch_of


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.ipynb").write_text("")
    (tmp_path / "train.sh").write_text("")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("train.py --lr 0.1", Launch("train.py", arguments=("--lr", "0.1"))),
        ("python train.py -m x", Launch("train.py", arguments=("-m", "x"))),
        ("-m package.train --lr 0.1", Launch("package.train", True, ("--lr", "0.1"))),
        ("torchrun train.py", Launch("train.py", ranks=1)),
        ("torchrun --nproc_per_node=4 train.py --x", Launch("train.py", False, ("--x",), 4)),
        ("torchrun --standalone --nproc-per-node 2 train.py", Launch("train.py", ranks=2)),
        ("torchrun --nproc_per_node=gpu -m a.b c", Launch("a.b", True, ("c",), 1)),
        ("-m torch.distributed.run --nproc_per_node 2 train.py", Launch("train.py", ranks=2)),
        ("python -u -X dev train.py -u", Launch("train.py", arguments=("-u",))),
        ("/usr/bin/python3.12 -O -m a.b", Launch("a.b", True)),
        ("SEED=1 L= python train.py", Launch("train.py", variables={"SEED": "1", "L": ""})),
        ("nohup uv run python train.py", Launch("train.py")),
        ("torchrun --nnodes 1:4 --nproc-per-node 2 train.py", Launch("train.py", ranks=2, nodes=4)),
        (
            "deepspeed --num_gpus 2 train.py --deepspeed",
            Launch("train.py", False, ("--deepspeed",), 2),
        ),
    ],
)
def test_a_line_names_the_script_and_its_arguments(line, wanted):
    assert launch_of(line.split()) == wanted


def test_torchruns_variables_are_those_of_rank_0():
    variables = launch_of(["torchrun", "--nproc_per_node=4", "train.py"]).environment
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == ("0", "0", "4")
    assert variables["LOCAL_WORLD_SIZE"] == "4"
    assert launch_of(["train.py"]).environment == {}
    nodes = launch_of(["A=1", "torchrun", "--nnodes=2", "--nproc_per_node=4", "train.py"])
    assert nodes.environment["WORLD_SIZE"] == "8"
    assert nodes.environment["A"] == "1"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "got no script; give one"),
        ("missing.py", "got 'missing.py'; there is no such file"),
        ("folder", "got 'folder', a folder; give the script in it"),
        ("-m", "got -m without a module"),
        ("torchrun --nproc_per_node 2", "got a launcher without a script"),
        ("torchrun --nproc_per_node=no train.py", "give a number from 1"),
        ("train.ipynb", "got 'train.ipynb', a notebook; make a script of it"),
        ("train.sh", "got 'train.sh', a shell script; give the python command in it"),
        ("python -c 1", "got python -c; give a script's path"),
        ("python", "got no script"),
        ("bash run.sh", "got bash, a shell; give the python command"),
        ("accelerate config", "got accelerate config; only accelerate launch runs"),
    ],
)
def test_a_wrong_line_is_refused_in_one_sentence(line, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        launch_of(line.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("given", "count"), [("0,2", 2), ("", 0), ("-1", 0), (None, None)])
def test_the_visible_gpus_are_counted(monkeypatch, given, count):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["train.py"] if given is None else [f"CUDA_VISIBLE_DEVICES={given}", "train.py"]
    assert launch_of(words).visible_gpus == count


@pytest.mark.parametrize(
    ("count", "ranks", "nodes"), [(4, 4, 1), (8, 8, 1), (64, 8, 8), (12, 12, 1)]
)
def test_ranks_fill_nodes_of_eight(count, ranks, nodes):
    launch = launch_of(["train.py"]).with_ranks(count)
    assert (launch.ranks, launch.nodes) == (ranks, nodes)
    last = replace(launch, rank=count - 1).environment
    assert (last["RANK"], last["WORLD_SIZE"]) == (str(count - 1), str(count))
    assert (last["LOCAL_RANK"], last["GROUP_RANK"]) == (str(ranks - 1), str(nodes - 1))


# ------------------------------------------------------------------ accelerate launch

FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 8
machine_rank: 0
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""


@pytest.fixture
def accelerate(tmp_path, monkeypatch):
    """Launch as on a machine without a config file of accelerate's own."""
    launching = pytest.importorskip("accelerate.commands.launch")
    monkeypatch.setattr(launching, "default_config_file", str(tmp_path / "none.yaml"))
    return lambda line: launch_of(["accelerate", "launch", *line.split()])


@pytest.mark.parametrize(
    ("line", "wanted", "precision"),
    [
        ("train.py --a b", Launch("train.py", False, ("--a", "b")), "no"),
        ("--multi_gpu --num_processes 8 train.py", Launch("train.py", ranks=8), "no"),
        (
            "--num_machines 2 --num_processes 8 train.py",
            Launch("train.py", ranks=4, nodes=2),
            "no",
        ),
        ("--mixed_precision=bf16 -m a.b", Launch("a.b", True), "bf16"),
    ],
)
def test_accelerates_options_are_its_own(accelerate, line, wanted, precision):
    launch = accelerate(line)
    assert replace(launch, variables={}) == wanted
    assert launch.variables["ACCELERATE_MIXED_PRECISION"] == precision
    assert "ACCELERATE_USE_FSDP" not in launch.variables


def test_accelerates_config_file_is_read(accelerate, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(FSDP2)
    launch = accelerate("--config_file fsdp.yaml train.py")
    assert (launch.ranks, launch.nodes) == (4, 2)
    wanted = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    }
    assert wanted.items() <= launch.environment.items()
    assert launch.environment["WORLD_SIZE"] == "8"
    override = accelerate("--config_file fsdp.yaml --mixed_precision no --fsdp_version 1 train.py")
    assert override.variables["ACCELERATE_MIXED_PRECISION"] == "no"
    assert override.variables["FSDP_VERSION"] == "1"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--foo train.py", "accelerate launch: unrecognized arguments: --foo"),
        ("--multi_gpu", "accelerate launch: the following arguments are required"),
        ("--config_file none.yaml train.py", "accelerate launch: The passed configuration file"),
        ("--multi_gpu --use_fsdp train.py", "accelerate launch: You can only use one of"),
        ("--use_deepspeed train.py", "whose engine memlab does not run; memlab plan --deepspeed"),
        ("--use_megatron_lm train.py", "with Megatron or a TPU, which memlab does not run"),
        ("missing.py", "got 'missing.py'; there is no such file"),
    ],
)
def test_what_accelerate_refuses_is_one_sentence(accelerate, capfd, line, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        accelerate(line)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
