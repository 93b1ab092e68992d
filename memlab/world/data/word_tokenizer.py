"""A tokenizer for models whose tokenizer is not on this machine: one token of each word.

Around texts it puts the special tokens that the model type's own tokenizer puts there, such as
BERT's [CLS] and [SEP]. A tokenizer of the same class without a vocabulary shows them. Many
decoders take them from files instead: Llama's and Gemma's add a token in front that this one lacks.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_SPECIAL_TOKENS = {
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
    "cls_token": "<cls>",
    "sep_token": "<sep>",
}
_NUMBERS = {token: number for number, token in enumerate(_SPECIAL_TOKENS.values())}
_CHAT = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
)
_ROLES = ("cls_token", "sep_token", "bos_token", "eos_token")  # of tokens around texts
_TEXTS = {"A": "$A", "B": "$B"}


class Template(NamedTuple):
    """The pieces of one text and of a pair: special tokens, $A and $B, each with its type id, as in
    `<cls>:0 $A:0 <sep>:0`. `inputs` names the tensors that the tokenizer returns."""

    single: str
    pair: str
    inputs: tuple[str, ...]


def template_of(tokenizer: Any) -> Template | None:
    """Return what a tokenizer of transformers puts around texts, in this tokenizer's special
    tokens; None if there is none or it cannot be known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    processor = getattr(backend, "post_processor", None)
    if processor is None or not tokenizer.num_special_tokens_to_add():
        return None
    state = json.loads(processor.__getstate__())
    inputs = tuple(tokenizer.model_input_names)
    if state["type"] == "TemplateProcessing":
        single, pair = (_pieces(tokenizer, state[kind]) for kind in ("single", "pair"))
        return Template(single, pair, inputs)
    if state["type"] in ("RobertaProcessing", "BertProcessing"):
        first, last = (_ours(tokenizer, state[role][0]) for role in ("cls", "sep"))
        between = f"{last}:0 {last}:0" if state["type"] == "RobertaProcessing" else f"{last}:0"
        kind = 1 if state["type"] == "BertProcessing" else 0
        pair = f"{first}:0 $A:0 {between} $B:{kind} {last}:{kind}"
        return Template(f"{first}:0 $A:0 {last}:0", pair, inputs)
    return None


def _pieces(tokenizer: Any, pieces: list[dict[str, Any]]) -> str:
    """Return a template of the tokenizers library in one line."""
    found = []
    for piece in pieces:
        [(kind, each)] = piece.items()
        name = _TEXTS[each["id"]] if kind == "Sequence" else _ours(tokenizer, each["id"])
        found.append(f"{name}:{each['type_id']}")
    return " ".join(found)


def _ours(tokenizer: Any, token: str) -> str:
    """Return this tokenizer's token in the place of another's; <unk> for a language's code."""
    roles = (role for role in _ROLES if getattr(tokenizer, role, None) == token)
    return token if token in _NUMBERS else _SPECIAL_TOKENS[next(roles, "unk_token")]


def words_tokenizer(
    options: Mapping[str, Any], template: Template | None = None, *, length: int | None = None
) -> Any:
    """Return the tokenizer, with a template's special tokens around texts.

    options   of `from_pretrained`; padding_side and model_max_length count
    length    its number of tokens, which scripts give to `resize_token_embeddings`; None: as many
              as it uses itself
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    unused = range(len(_NUMBERS), length or 0)
    numbers = {**_NUMBERS, **{f"<unused {number}>": number for number in unused}}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # diffusers pads to the tokenizer's `model_max_length`.
    kept = {key: options[key] for key in ("padding_side", "model_max_length") if key in options}
    if template is not None:
        words.post_processor = processors.TemplateProcessing(
            single=template.single, pair=template.pair, special_tokens=list(_NUMBERS.items())
        )
        kept["model_input_names"] = list(template.inputs)
    made = PreTrainedTokenizerFast(tokenizer_object=words, **_SPECIAL_TOKENS, **kept)
    made.chat_template = _CHAT
    return made
