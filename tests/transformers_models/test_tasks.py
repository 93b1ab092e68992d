"""The training objective is chosen from the architecture."""

import json

import pytest

from memlab.transformers_models.recipes import Recipe
from memlab.transformers_models.sources import Source
from memlab.transformers_models.tasks import Size
from memlab.transformers_models.training import Training


@pytest.mark.parametrize(
    ("family", "architectures", "words", "class_name"),
    [
        ("mistral", ["MistralForCausalLM"], "the next token", "MistralForCausalLM"),
        ("bert", ["BertForMaskedLM"], "masked tokens", "BertForMaskedLM"),
        ("bert", ["BertModel"], "masked tokens", "BertForMaskedLM"),
        ("bert", None, "masked tokens", "BertForMaskedLM"),
        (
            "bert",
            ["BertForSequenceClassification"],
            "text classification",
            "BertForSequenceClassification",
        ),
        (
            "bert",
            ["BertForTokenClassification"],
            "classification of each token",
            "BertForTokenClassification",
        ),
        ("bert", ["BertForQuestionAnswering"], "the span of an answer", "BertForQuestionAnswering"),
        ("t5", None, "text to text, equally long", "T5ForConditionalGeneration"),
        ("whisper", None, "speech recognition", "WhisperForConditionalGeneration"),
        ("wav2vec2", ["Wav2Vec2ForCTC"], "speech recognition (CTC)", "Wav2Vec2ForCTC"),
        ("vit", ["ViTModel"], "image classification", "ViTForImageClassification"),
        (
            "qwen2_vl",
            ["Qwen2VLForConditionalGeneration"],
            "text without images",
            "Qwen2VLForConditionalGeneration",
        ),
    ],
)
def test_a_config_gets_the_task_of_its_class(family, architectures, words, class_name, training_of):
    training = training_of(family, architectures=architectures)
    assert (training.task.words, training.class_name) == (words, class_name)


def test_the_default_length_is_the_models_if_it_is_short(training_of):
    assert training_of("mistral", seq_len=None).completed_size.seq_len == 64
    long = training_of("mistral", seq_len=None, max_position_embeddings=10_000)
    assert long.completed_size.seq_len == 2048
    assert training_of("t5", seq_len=None).completed_size.seq_len == 512


@pytest.mark.parametrize(
    ("family", "size", "complaint"),
    [
        ("mistral", Size(1, 65), "got sequences of 65 tokens; the model takes 1 to 64"),
        ("vit", Size(1, 8), "got --seq 8; training on image classification takes no text"),
        ("mistral", Size(1, 8, 224), "got --image 224; training on the next token takes no images"),
    ],
)
def test_a_size_that_the_model_does_not_take(family, size, complaint, training_of):
    training = Training(training_of(family).source, size)
    with pytest.raises(ValueError, match=complaint):
        _ = training.completed_size


def test_an_image_size_changes_the_inputs(training_of):
    training = Training(training_of("vit").source, Size(1, None, 64))
    step, *_ = training.build(Recipe(), "cpu")
    step()
    assert "1 image of 64 × 64 pixels" in str(training)


def test_what_is_assumed_is_one_line(training_of):
    assert str(training_of("whisper")) == (
        "whisper, trained on speech recognition, 2 × 16 tokens without padding, 60 frames of "
        "speech each"
    )


def test_an_unknown_kind_of_rotary_embedding_is_named(tmp_path):
    fields = {"model_type": "llama", "rope_scaling": {"rope_type": "odd", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    training = Training(Source("x", str(tmp_path / "config.json")))
    with pytest.raises(ValueError, match="rope_type in rope_scaling is 'odd', and it knows dyn"):
        _ = training.skeleton


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "no-such-model"}, "cannot read"),
        (
            {"model_type": "llama", "torch_dtype": "os.system"},
            "cannot read .* torch_dtype is 'os.system', which is no dtype of torch",
        ),
        ({}, "cannot read"),
        ({"model_type": "clap"}, "which transformers builds for none of these trainings"),
    ],
)
def test_a_config_that_cannot_be_trained_is_one_sentence(fields, complaint, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    training = Training(Source("x", str(tmp_path / "config.json")))
    with pytest.raises(ValueError, match=complaint) as caught:
        _ = training.task
    assert "\n" not in str(caught.value)
