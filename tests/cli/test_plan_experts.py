"""`memlab plan --gpus N` for a mixture of experts: the table, its document, its errors."""

import json
from importlib.resources import files

import jsonschema
import pytest

from memlab.configs.mixtures import MIXTURES
from memlab.planner.cards import budget_bytes, memory_named
from memlab.planner.expert_parallel import ExpertMesh, expert_bytes, sent_bytes
from memlab.units import format_bytes

SCHEMA = json.loads((files("memlab.cli") / "schema.json").read_text(encoding="utf-8"))
MIXTRAL = MIXTURES["mixtral-8x7b"]
SIZES = {"sequences": 1, "seq_len": 2_048}
WORKSPACE = 64 * 2**20  # cuBLAS's on a Hopper GPU, of forward and backward


@pytest.fixture
def plan(memlab_command):
    """Plan Mixtral on 64 H100s, unless the options say otherwise."""

    def run(*options, model="mixtral-8x7b", gpus=64, gpu="h100"):
        return memlab_command("plan", "--model", model, "--gpu", gpu, "--gpus", gpus, *options)

    return run


@pytest.fixture
def document(plan):
    def run(*options, **others):
        found = json.loads(plan(*options, "--json", **others).out)
        jsonschema.Draft202012Validator(SCHEMA).validate(found)
        return found

    return run


def test_each_degree_has_its_bytes_and_what_it_sends(plan):
    outcome = plan("--imbalance", "1.5", "--wide")
    assert outcome.status == 0, outcome.err
    lines = [line.split("  ") for line in outcome.out.splitlines() if " GPUs  " in line]
    rows = {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in lines}
    assert set(rows) == {"8 GPUs", "4 GPUs", "2 GPUs"}
    for degree in (2, 4, 8):
        mesh = ExpertMesh(64, degree, checkpointed=False)
        even = expert_bytes(MIXTRAL, mesh, **SIZES, workspace=WORKSPACE).total
        busiest = expert_bytes(MIXTRAL, mesh, **SIZES, workspace=WORKSPACE, imbalance=1.5).total
        sent = sent_bytes(MIXTRAL, mesh, **SIZES, imbalance=1.5)
        shown = rows[f"{degree} GPUs"]
        assert shown[:2] == [format_bytes(even), format_bytes(busiest)]
        between = format_bytes(sent["data"] + sent["replicas"])
        assert shown[3:6] == [*[format_bytes(sent["tokens"])] * 2, between]


def test_a_gpus_shards_are_those_of_fsdp(plan):
    """16 bytes a weight, over 64 GPUs."""
    text = " ".join(plan().out.split())
    weights, state = (format_bytes(-(-46_702_792_704 // 64) * size) for size in (4, 8))
    assert f"shards are {weights} of weights, {weights} of gradients and {state} of" in text


def test_the_report_fits_80_columns_and_says_what_is_dropped(plan):
    outcome = plan("--imbalance", "2")
    text = " ".join(outcome.out.split())
    assert "would drop 37.5% of the busiest expert's tokens (9.4% of all" in text
    assert "drops nothing here" in " ".join(plan().out.split())
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_the_document_has_the_imbalance_and_the_largest_that_fits(document):
    found = document("--imbalance", "1.5")
    assert (found["verdict"], found["chosen"]) == ("fits with another recipe", 0)
    assert found["parameters"] == 46_702_792_704
    option = next(each for each in found["options"] if each["settings"]["experts"] == 8)
    assert option["imbalance"] == 1.5
    mesh = ExpertMesh(64, 8, checkpointed=False)
    assert option["sent_bytes"] == sent_bytes(MIXTRAL, mesh, **SIZES, imbalance=1.5)
    largest, budget = option["largest_imbalance"], budget_bytes(memory_named("h100"), "cuda:h100")
    assert found["budget_bytes"] == budget
    at = [
        round(1.1 * expert_bytes(MIXTRAL, mesh, **SIZES, workspace=WORKSPACE, imbalance=k).total)
        for k in (largest, largest + 8 / (2 * 2_048 * 8))
    ]
    assert at[0] <= budget < at[1]


def test_the_command_accepts_that_imbalance_and_then_recomputes(document):
    """Beyond it the row has recomputed blocks."""
    largest = document()["options"][0]["largest_imbalance"]
    rows = [
        document("--imbalance", f"{largest + more}", "--expert-parallel", 8)["options"][0]
        for more in (0, 0.01)
    ]
    assert [row["settings"]["checkpointed"] for row in rows] == [False, True]
    assert all(row["fits"] for row in rows)


def test_one_degree_can_be_chosen(document):
    rows = document("--expert-parallel", 4)["options"]
    assert [row["settings"]["experts"] for row in rows] == [4]


def test_without_room_the_status_is_one(plan):
    outcome = plan("--seq", 4_096, gpus=8)
    assert outcome.status == 1
    text = " ".join(outcome.out.split())
    assert "Nothing fits h100: experts over " in text
    assert " no " in text


def test_a_config_json_of_a_mixture_is_planned(plan, tmp_path):
    fields = {
        "model_type": "qwen3_moe",
        "vocab_size": 1_024,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "intermediate_size": 512,
        "max_position_embeddings": 4_096,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    outcome = plan(model="config.json", gpus=16)
    assert outcome.status == 0, outcome.err
    assert "16 experts in a layer, 4 for a token" in " ".join(outcome.out.split())
    assert "16 GPUs" in outcome.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--imbalance", "x"), "got --imbalance x; expected the tokens of the busiest expert"),
        (("--imbalance", "0.5"), "a number from 1 such as 1.5"),
        (("--imbalance", "nan"), "got --imbalance nan; expected"),
        (("--imbalance", "9"), "get at most 4 times their share"),
        (("--expert-parallel", "3"), "the 8 experts and the 64 GPUs: give 1, 2, 4 or 8"),
        (("--expert-parallel", "16"), "give 1, 2, 4 or 8"),
        (("--lora",), "got --lora for mixtral-8x7b, a mixture of experts on several GPUs"),
        (("--image", 8, "--optimizer", "lion"), "got --optimizer and --image for mixtral-8x7b"),
        (("--device", "cpu"), "got --device cpu for mixtral-8x7b"),
        (("--library", "transformers"), "got --library for mixtral-8x7b"),
        (("--seq", "65536"), "mixtral-8x7b takes 1 to 32768"),
        (("--script", "train.py:build"), "got --script together with --model; a script"),
    ],
)
def test_bad_input_is_one_line(plan, options, words):
    outcome = plan(*options)
    assert (outcome.status, outcome.out) == (2, "")
    [line] = outcome.err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("others", "options", "words"),
    [
        ({"model": "llama-3-8b"}, ("--imbalance", 2), "llama-3-8b, which has no experts: leave"),
        ({"model": "5m"}, ("--expert-parallel", 2), "got --expert-parallel for 5m, which has no"),
        ({"gpus": 1}, (), "got --model mixtral-8x7b for one GPU, and this preset is planned for"),
    ],
)
def test_models_that_are_not_divided_are_refused(plan, others, options, words):
    outcome = plan(*options, **others)
    assert (outcome.status, outcome.out) == (2, "")
    assert words in outcome.err


def test_other_mixtures_are_named(plan, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    outcome = plan("--imbalance", 2, model="config.json")
    assert outcome.status == 2
    assert "expert parallelism is planned for mixtral and qwen3_moe: leave it out" in outcome.err
