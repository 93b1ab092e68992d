"""Choose how a model is trained from its architecture, and make inputs for it.

The class in the config's `architectures` decides. A base class (BertModel), a class with another
purpose, or none gives the model type's usual training: an encoder-decoder maps text or speech to
text, an encoder predicts masked tokens, a decoder the next token.

Inputs have no padding, so there is no attention mask.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Tensor]

DECODER_TOKENS = 2048  # default length of a decoder's sequences, if it has as many positions
OTHER_TOKENS = 512
SPEECH_TARGET_TOKENS = 256
USUAL_IMAGE = 224  # pixels, of a model without a size
AUDIO_SAMPLES = 160_000  # 10 seconds at 16 kHz


@dataclass(frozen=True)
class Size:
    """The size of a batch. None: the task's default.

    seq_len   tokens per sequence (of the targets, in speech recognition)
    image     height and width of an image, in pixels
    """

    batch: int = 1
    seq_len: int | None = None
    image: int | None = None


@dataclass(frozen=True)
class Task:
    """A training objective.

    words        what the model learns, for the output
    auto_class   transformers' class that builds such models
    mapping      transformers' table of such models
    inputs       makes a batch: tensors by name
    """

    words: str
    auto_class: str
    mapping: str
    inputs: Callable[[Any, Size], Inputs]
    tokens: int | None = OTHER_TOKENS  # default length; None: the inputs are no text


def _tokens(config: Any, size: Size, name: str = "input_ids") -> Inputs:
    assert size.seq_len is not None
    text = config.get_text_config()
    return {name: torch.randint(0, text.vocab_size, (size.batch, size.seq_len))}


def _next_token(config: Any, size: Size) -> Inputs:
    """Tokens and labels, each (B, T)."""
    inputs = _tokens(config, size)
    return {**inputs, "labels": inputs["input_ids"].clone()}


def _sequence_to_sequence(config: Any, size: Size) -> Inputs:
    """Tokens and labels, each (B, T)."""
    return {**_tokens(config, size), **_tokens(config, size, "labels")}


def _class_of_text(config: Any, size: Size) -> Inputs:
    return {**_tokens(config, size), "labels": _classes(config, size.batch)}


def _class_of_each_token(config: Any, size: Size) -> Inputs:
    assert size.seq_len is not None
    return {**_tokens(config, size), "labels": _classes(config, size.batch, size.seq_len)}


def _span(config: Any, size: Size) -> Inputs:
    positions = {name: torch.zeros(size.batch, dtype=torch.int64) for name in ("start", "end")}
    return {
        **_tokens(config, size),
        **{f"{name}_positions": position for name, position in positions.items()},
    }


def _pixels(config: Any, size: Size) -> Tensor:
    """Images (B, C, H, W)."""
    channels = getattr(config, "num_channels", 3)
    return torch.randn(size.batch, channels, *_image_sides(config, size), dtype=torch.float32)


def _class_of_image(config: Any, size: Size) -> Inputs:
    return {"pixel_values": _pixels(config, size), "labels": _classes(config, size.batch)}


def _speech(config: Any, size: Size) -> Inputs:
    """Spectrograms (B, mel bins, frames) and tokens (B, T)."""
    frames = 2 * config.max_source_positions  # two per position: the second convolution's stride
    features = torch.randn(size.batch, config.num_mel_bins, frames, dtype=torch.float32)
    return {"input_features": features, **_tokens(config, size, "labels")}


def _audio(config: Any, size: Size) -> Inputs:
    """Samples (B, samples) and tokens (B, T)."""
    assert size.seq_len is not None
    labels = torch.ones(size.batch, size.seq_len, dtype=torch.int64)  # the loss reads the values
    samples = torch.randn(size.batch, AUDIO_SAMPLES, dtype=torch.float32)
    return {"input_values": samples, "labels": labels}


def _classes(config: Any, *shape: int) -> Tensor:
    return torch.randint(0, config.num_labels, shape)


# In the order of trying for a model type.
TASKS = (
    Task(
        "speech recognition",
        "AutoModelForSpeechSeq2Seq",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        _speech,
        SPEECH_TARGET_TOKENS,
    ),
    Task(
        "text to text, equally long",
        "AutoModelForSeq2SeqLM",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        _sequence_to_sequence,
    ),
    Task(
        "text without images",
        "AutoModelForImageTextToText",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        _next_token,
        DECODER_TOKENS,
    ),
    Task(
        "masked tokens",
        "AutoModelForMaskedLM",
        "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        _next_token,
    ),
    Task(
        "the next token",
        "AutoModelForCausalLM",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        _next_token,
        DECODER_TOKENS,
    ),
    Task(
        "image classification",
        "AutoModelForImageClassification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        _class_of_image,
        None,
    ),
    Task(
        "speech recognition (CTC)",
        "AutoModelForCTC",
        "MODEL_FOR_CTC_MAPPING_NAMES",
        _audio,
        64,
    ),
    Task(
        "text classification",
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        _class_of_text,
    ),
    Task(
        "classification of each token",
        "AutoModelForTokenClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        _class_of_each_token,
    ),
    Task(
        "the span of an answer",
        "AutoModelForQuestionAnswering",
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
        _span,
    ),
)


def task_of(config: Any) -> Task:
    """Choose the task of a config. Raises ValueError if transformers has no model for any task."""
    classes = config.architectures or ()
    for task in TASKS:
        if any(name in classes for name in class_names(task, config.model_type)):
            return task
    for task in TASKS:
        names = class_names(task, config.model_type)
        if names and config.is_encoder_decoder == (task in _ENCODER_DECODERS):
            return task
    raise ValueError(
        f"got a config of model_type {config.model_type!r}, which transformers builds for none of "
        f"these trainings: {', '.join(task.words for task in TASKS)}; write the step in a script "
        f"and use --script"
    )


_ENCODER_DECODERS = TASKS[:2]


def class_names(task: Task, model_type: str) -> tuple[str, ...]:
    """Return transformers' classes of a model type for a task; () if there are none."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, task.mapping).get(model_type, ())
    return names if isinstance(names, tuple) else (names,)


def completed(size: Size, task: Task, config: Any) -> Size:
    """Fill in the default length. Raises ValueError for more tokens than the model has positions
    for, and for an image size without images."""
    if size.image is not None and task.inputs is not _class_of_image:
        raise ValueError(f"got --image {size.image}; training on {task.words} takes no images")
    if task.tokens is None:
        if size.seq_len is not None:
            raise ValueError(f"got --seq {size.seq_len}; training on {task.words} takes no text")
        return size
    most = positions(config)
    usual = LOOPED_TOKENS if loops_over_tokens(config) else task.tokens
    seq_len = size.seq_len or min(usual, most or usual)
    if most is not None and seq_len > most:
        raise ValueError(f"got sequences of {seq_len} tokens; the model takes 1 to {most:,}")
    return Size(size.batch, seq_len, size.image)


def loops_over_tokens(config: Any) -> bool:
    """Return whether layers loop over the tokens in Python, which takes minutes for long texts.
    On CUDA, their packages' own kernels replace the loop."""
    return config.model_type in _LOOPING


def positions(config: Any) -> int | None:
    """Return the most tokens per sequence, if the config limits them."""
    if config.model_type in _RELATIVE:
        return None
    text = config.get_text_config(decoder=config.is_encoder_decoder)
    known = (getattr(text, name, None) for name in _POSITIONS)
    found = next((value for value in known if isinstance(value, int) and value > 0), None)
    reserved = getattr(text, "pad_token_id", None) or 0
    return found - reserved - 1 if found and config.model_type in _FROM_PADDING else found


LOOPED_TOKENS = 128
_LOOPING = {"mamba", "falcon_mamba", "jamba", "rwkv"}
_POSITIONS = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len")
_RELATIVE = {"t5", "mt5", "umt5", "longt5", "bloom", "mpt"}  # distances, not positions
_FROM_PADDING = {"roberta", "xlm-roberta", "camembert", "mpnet", "longformer"}  # count from there


def _image_sides(config: Any, size: Size) -> tuple[int, int]:
    """Return the height and width of the images."""
    image = size.image or getattr(config, "image_size", None) or USUAL_IMAGE
    return tuple(image) if isinstance(image, list | tuple) else (image, image)


def described(task: Task, size: Size, config: Any) -> str:
    """Say in one line what is assumed of the training."""
    return ", ".join(_parts(task, size, config))


def _parts(task: Task, size: Size, config: Any) -> Iterator[str]:
    yield f"trained on {task.words}"
    if size.seq_len is not None:
        yield f"{size.batch} × {size.seq_len} tokens without padding"
    if task.inputs is _class_of_image:
        height, width = _image_sides(config, size)
        images = "image" if size.batch == 1 else "images"
        yield f"{size.batch} {images} of {height} × {width} pixels"
    if task.inputs is _speech:
        yield f"{2 * config.max_source_positions} frames of speech each"
    if task.inputs is _audio:
        yield f"{AUDIO_SAMPLES:,} samples of speech each"
