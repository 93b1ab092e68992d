"""`memlab plan --deepspeed`: the report, its document, its errors."""

import json

import pytest

ON_CPU = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "activation_checkpointing": {},
    "zero_optimization": {
        "stage": 3,
        "a_new_key": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}


@pytest.fixture
def plan(memlab_command, tmp_path):
    """List the keys of a config for 7B, unless the options say otherwise."""

    def run(config, *options):
        (tmp_path / "ds.json").write_text(config if isinstance(config, str) else json.dumps(config))
        given = ("--model", "llama-2-7b") if "--model" not in options else ()
        return memlab_command("plan", *given, "--deepspeed", "ds.json", *options)

    return run


def test_the_report_has_each_part_and_no_verdict(plan):
    outcome = plan(ON_CPU)
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == "llama-2-7b with ds.json: ZeRO stage 3 on 1 GPU"
    text = " ".join(outcome.out.split())
    assert "unknown key: zero_optimization.a_new_key; DeepSpeed refuses it" in text
    assert "gradient_clipping, activation_checkpointing" in text
    assert "weights: bf16.enabled = true, stage = 3, offload_param.device = cpu 12.55 GiB" in text
    assert "reduce buckets: reduce_bucket_size = 500,000,000 (default) 953.67 MiB" in text
    assert "by formula, for one process; memlab does not run DeepSpeed's engine" in text
    assert not {"fits,", "lacks"} & {*text.split()}
    assert max(map(len, lines)) <= 80


def test_the_document_has_the_parts_in_numbers(plan, schema):
    outcome = plan(ON_CPU, "--gpus", 8, "--json")
    found = json.loads(outcome.out)
    schema.validate(found)
    config = found["deepspeed"]
    assert config["unknown"] == {"zero_optimization.a_new_key": ""}
    parts = {each["part"]: each for each in config["parts"]}
    shard = -(-found["parameters"] // 8)
    assert parts["weights"]["host_bytes"] == 2 * shard
    assert parts["weights"]["keys"]["zero_optimization.offload_param.device"] == "cpu"
    assert sum(each["host_bytes"] for each in parts.values()) == 20 * shard
    assert (found["verdict"], found["options"], found["memory"]) == ("not judged", [], None)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ("{", (), "got --deepspeed ds.json: line 1, column 2 is no JSON"),
        ({"zero_optimization": {"stage": 7}}, (), "ZeRO has stages 0 to 3"),
        ({}, ("--batch", 3), "got --deepspeed together with --batch"),
        ({}, ("--optimizer", "lion"), "got --deepspeed together with --optimizer"),
        ({}, ("--recipes", 2, "--full"), "got --deepspeed together with --recipes, --full"),
        ({}, ("--device", "cpu"), "got --deepspeed together with --device"),
        ({"zero_optimization": {"stag": 1}}, (), "did you mean zero_optimization.stage?"),
        ({}, ("--gpu=t4",), "got --deepspeed together with --gpu; the table"),
        ({}, ("--model", "none/config.json"), "got --model none/config.json"),
    ],
)
def test_bad_input_is_one_line(plan, config, options, words):
    outcome = plan(config, *options)
    assert (outcome.status, outcome.out) == (2, "")
    [line] = outcome.err.splitlines()
    assert words in line


def test_without_a_model_or_a_file_it_says_what_to_give(usage_error):
    assert "got --deepspeed without --model" in usage_error("plan", "--deepspeed", "ds.json")
    words = usage_error("plan", "--model", "5m", "--deepspeed", "ds.json")
    assert "reading ds.json failed: No such file or directory" in words


def test_a_model_that_only_transformers_builds_is_refused(plan, tmp_path):
    (tmp_path / "gpt2.json").write_text(json.dumps({"model_type": "gpt2"}))
    outcome = plan({}, "--model", "gpt2.json")
    assert outcome.status == 2
    assert "by formula, which memlab has for Llama" in outcome.err
