"""`memlab plan`, `measure` and `train` with models that memlab has no code of."""

import json
import os
import signal

import pytest

from tests.quick import slow
from tests.transformers_models.configs import TINY

pytestmark = pytest.mark.filterwarnings("ignore:inner dimension")  # of tiny 4-bit weights


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("memlab.transformers_models.planning.MAX_WORKERS", 1)


@pytest.fixture
def config(tmp_path):
    """Return a function that writes a tiny config.json into a folder."""

    def write(family, **changes):
        folder = tmp_path / family
        folder.mkdir(exist_ok=True)
        fields = {**TINY[family], "model_type": family, **changes}
        (folder / "config.json").write_text(json.dumps(fields))
        return family

    return write


@pytest.mark.slow
def test_a_plan_has_a_row_for_each_group_and_code_for_the_first(config, memlab_command, tmp_path):
    model = config("mixtral", hidden_size=64)
    outcome = memlab_command("plan", "--model", model, "--gpu", "rtx4090")
    assert (outcome.status, outcome.err) == (0, "")
    words = " ".join(outcome.out.split())
    assert "transformers' MixtralForCausalLM" in words
    assert "trained on the next token, 1 × 64 tokens without padding" in words
    for group in (
        "all weights, float32 with bfloat16 autocast: adamw",
        "all weights, bfloat16: adamw",
        "LoRA of rank 8 beside bfloat16 weights: adamw",
        "LoRA of rank 8 beside 4-bit weights: adamw",
    ):
        assert group in words
    assert 'from_pretrained( "mixtral"' in words
    assert "bitsandbytes quantizes linear layers alone; 81% of this model's weights" in words
    assert all(len(line) <= 80 for line in outcome.out.splitlines())
    numbers = json.loads((tmp_path / "work" / "plan.json").read_text())
    rows = numbers["options"]
    assert [row["settings"]["method"] for row in rows] == ["full", "full", "lora", "qlora"]
    assert all(row["fits"] and row["missing_bytes"] < 0 for row in rows)
    assert all(row["longest_sequence"] == 64 and row["largest_batch"] > 1 for row in rows)
    assert (tmp_path / "work" / "plan.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_code_can_be_memlabs(config, memlab_command):
    given = ("plan", "--model", config("mixtral"), "--gpu", "rtx4090", "--lora", "--code", "memlab")
    outcome = memlab_command(*given)
    assert (outcome.status, outcome.err) == (0, "")
    assert "  add_lora(model, rank=8, where=where)\n" in outcome.out
    assert "peft" not in outcome.out


def test_if_nothing_fits_the_status_is_one(config, memlab_command):
    model = config("bert", vocab_size=10_000_000, hidden_size=512)
    outcome = memlab_command("plan", "--model", model, "--gpu", "rtx3060", "--full")
    assert outcome.status == 1
    words = " ".join(outcome.out.split())
    assert "lacks ≥" in words
    assert "nothing fits; use a shorter sequence, a smaller batch or a larger GPU" in words


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "options", "assumed"),
    [
        ("vit", ("--image", "64"), "trained on image classification, 1 image of 64 × 64 pixels"),
        ("t5", ("--seq", "8"), "trained on text to text, equally long, 1 × 8 tokens"),
        slow(
            ("whisper", ("--batch", "3"), "3 × 32 tokens without padding, 60 frames of speech each")
        ),
    ],
)
def test_what_is_assumed_is_said(family, options, assumed, config, memlab_command):
    given = ("--model", config(family), "--technique", "checkpointing", *options)
    outcome = memlab_command("measure", *given, "--dry-run", "--device", "cuda")
    assert (outcome.status, outcome.err) == (0, "")
    assert assumed in " ".join(outcome.out.split())


def test_measured_steps_are_compared(config, memlab_command, tmp_path):
    outcome = memlab_command("measure", "--model", config("gpt2"), "--technique", "lora")
    assert outcome.status == 0
    rows = json.loads((tmp_path / "work" / "measure.json").read_text())["rows"]
    assert [row["technique"] for row in rows] == ["plain", "lora"]
    assert rows[0]["peak_bytes"] > rows[1]["peak_bytes"] > 0


def test_a_dry_run_is_one_answer_unless_more_is_wanted(config, memlab_command, tmp_path):
    assert memlab_command("measure", "--model", config("gpt2"), "--dry-run").status == 0
    rows = json.loads((tmp_path / "work" / "measure.json").read_text())["rows"]
    assert [row["technique"] for row in rows] == ["plain"]


def test_a_step_larger_than_the_machine_does_not_start(config, usage_error, monkeypatch):
    monkeypatch.setattr("memlab.cli.choices.memory_of", lambda device: (10**9, 2**10))
    line = usage_error("measure", "--model", config("gpt2"))
    assert line.endswith(
        "this machine has 1.00 KiB; make it smaller, or use memlab measure --dry-run, which "
        "allocates nothing"
    )


def test_training_runs(config, memlab_command):
    given = ("--model", config("starcoder2"), "--technique", "lora+checkpointing", "--steps", "2")
    outcome = memlab_command("train", *given)
    assert (outcome.status, outcome.err) == (0, "")
    assert "step 2: loss 4." in outcome.out
    assert "measured in one more step" in outcome.out


def test_llama_is_memlabs_own_unless_the_library_is_given(config, memlab_command):
    given = ("measure", "--model", config("llama"), "--dry-run", "--technique", "checkpointing")
    ours = memlab_command(*given, "--seq", "8", "--batch", "1").out
    theirs = memlab_command(*given, "--seq", "8", "--library", "transformers").out
    assert "trained on the next token" in theirs
    assert "trained on the next token" not in ours


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--gpu", "t4", "--seq", "65"), "got sequences of 65 tokens; the model takes 1 "),
        (("plan", "--gpu", "t4", "--image", "8"), "takes no images"),
        (("plan", "--gpu", "t4", "--device", "cpu"), "which is planned for a GPU"),
        (
            ("plan", "--gpu", "t4", "--optimizer", "lion"),
            "got --optimizer lion; choose from",
        ),
        (("plan", "--gpu", "t4", "--library", "memlab"), "known are llama, mistral"),
        (("plan", "--gpu", "t4", "--code", "mine"), "got --code mine; choose from production"),
        (("plan", "--gpu", "t4", "--library", "jax"), "got --library jax; choose from"),
        (("measure", "--technique", "lion"), "a model of transformers trains with"),
        (("measure", "--technique", "lora+qlora"), "set the method twice"),
        (("measure", "--dtype", "float16"), "give float32 or bfloat16"),
        (("train", "--technique", "no"), "got the technique 'no'"),
        (("plan", "--gpu", "t4", "--lora-targets", "wq"), "some of k_proj, o_proj, q_proj, v_proj"),
    ],
)
def test_bad_input_is_one_line(arguments, words, config, usage_error):
    command, *others = arguments
    assert words in usage_error(command, "--model", config("mixtral"), *others)


def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_process_of_a_plan_is_reported_in_one_line(config, memlab_command, monkeypatch):
    monkeypatch.setattr("memlab.transformers_models.planning.MAX_WORKERS", 2)
    monkeypatch.setattr("memlab.transformers_models.planning._best", killed)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    outcome = memlab_command("plan", "--model", config("gpt2"), "--gpu", "t4")
    assert outcome.status == 2
    message = outcome.err.splitlines()[-1]
    assert message.startswith("memlab: one of 2 processes that predict steps was ended by SIGKILL")


def test_a_model_of_transformers_is_planned_for_one_gpu(config, usage_error):
    words = usage_error("plan", "--model", config("gpt2"), "--gpu", "t4", "--gpus", "2")
    assert "got --gpus for gpt2, a model of transformers; it is planned for one GPU" in words


@pytest.mark.parametrize("command", ["plan", "measure", "train"])
def test_a_model_that_is_not_there_is_one_line(command, usage_error, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    memory = ("--gpu", "t4") if command == "plan" else ()
    message = usage_error(command, "--model", "someone/missing", *memory)
    assert "its config.json is not in the local Hugging Face cache" in message
