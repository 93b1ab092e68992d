"""Stand in for what a script loads from the Hugging Face Hub and this machine does not have.

weights      random ones (fake in a dry run) in the shapes of the config, loaded as a file's
             are: quantized, cast, and put where the script asks
configs      of the file or folder that `--config NAME=PATH` names; without one, the script
             stops with a sentence
tokenizers   one that makes a token of each word
data sets    of rows that `--batch-like` describes; without it, the script stops
metrics      of `evaluate`, that compute nothing
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from memlab.scripts.columns import Columns

Note = Callable[[str, str], None]  # (what is missing, what stands in)
Replacement = tuple[tuple[Any, str], Callable[[Any], Any]]
_SPECIAL_TOKENS = {
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
    "cls_token": "<cls>",
    "sep_token": "<sep>",
}
_WORD_TOKENS = {token: number for number, token in enumerate(_SPECIAL_TOKENS.values())}
_NAME = "pretrained_model_name_or_path"
_FEWEST_TOKENS = 100  # of any tokenizer that has its files
_CHAT = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
)


class UnavailableError(OSError):
    """What the script needs is not on this machine. The message says what to pass."""


class Hub:
    """The stand-ins, and where the configs are.

    configs   paths by the name that the script uses
    columns   of the rows of missing data sets
    """

    def __init__(
        self, note: Note, configs: Mapping[str, str] | None = None, columns: Columns | None = None
    ) -> None:
        self._note, self._configs, self._columns = note, dict(configs or {}), columns

    def patches(self) -> dict[str, Callable[[ModuleType], Iterator[Replacement]]]:
        """Return what to replace in each module, once it is imported."""
        return {
            "transformers.configuration_utils": self._configs_of_transformers,
            "transformers.modeling_utils": self._weights_of_transformers,
            "transformers.tokenization_utils_base": self._tokenizers,
            "transformers.models.auto.tokenization_auto": self._auto_tokenizers,
            "transformers.models.auto.image_processing_auto": self._image_processors,
            "transformers.models.auto.feature_extraction_auto": self._feature_extractors,
            "diffusers.configuration_utils": self._configs_of_diffusers,
            "diffusers.models.modeling_utils": self._weights_of_diffusers,
            "datasets": self._data_sets,
            "evaluate": self._metrics,
        }

    # ------------------------------------------------------------------ configs

    def _configs_of_transformers(self, module: ModuleType) -> Iterator[Replacement]:
        yield (module.PreTrainedConfig, "get_config_dict"), _of_class(self._config_dict)

    def _configs_of_diffusers(self, module: ModuleType) -> Iterator[Replacement]:
        yield (module.ConfigMixin, "load_config"), _of_class(self._config_dict)

    def _config_dict(self, real: Callable[..., Any], cls: type, name: Any, **options: Any) -> Any:
        if (given := self._configs.get(str(name))) is not None:
            return real(cls, given, **options)
        try:
            return real(cls, name, **options)
        except OSError as error:
            raise UnavailableError(
                f"the config of {name} is not on this machine; pass --config {name}=PATH, with a "
                f"config.json or the folder that it is in"
            ) from error

    # ------------------------------------------------------------------ weights

    def _weights_of_transformers(self, module: ModuleType) -> Iterator[Replacement]:
        yield (module.PreTrainedModel, "from_pretrained"), _of_class(self._model_of_transformers)

    def _model_of_transformers(
        self, real: Callable[..., Any], cls: Any, name: Any, *args: Any, **options: Any
    ) -> Any:
        try:
            return real(cls, name, *args, **options)
        except OSError:
            if name is None:
                raise
        config = options.pop("config", None)
        if config is None:
            where = {key: options[key] for key in ("subfolder", "revision") if key in options}
            config = cls.config_class.from_pretrained(name, **where)
        self._note(f"the weights of {name}", "random weights")
        options.pop("subfolder", None)
        made = cls(config)
        weights = made.state_dict()
        for tied in made.all_tied_weights_keys:  # not in a file
            weights.pop(tied, None)
        del made
        model = real(cls, None, *args, config=config, state_dict=weights, **options)
        model.name_or_path = model.config.name_or_path = name  # trl loads the tokenizer of it
        return model

    def _weights_of_diffusers(self, module: ModuleType) -> Iterator[Replacement]:
        yield (module.ModelMixin, "from_pretrained"), _of_class(self._model_of_diffusers)

    def _model_of_diffusers(
        self, real: Callable[..., Any], cls: Any, name: Any, *args: Any, **options: Any
    ) -> Any:
        try:
            return real(cls, name, *args, **options)
        except OSError:
            where = {key: options[key] for key in ("subfolder", "revision") if key in options}
        self._note(f"the weights of {name}", "random weights")
        model = cls.from_config(cls.load_config(name, **where))
        dtype = options.get("torch_dtype") or options.get("dtype")
        return model if dtype is None else model.to(dtype)

    # ------------------------------------------------------------------ tokenizers

    def _tokenizers(self, module: ModuleType) -> Iterator[Replacement]:
        yield (module.PreTrainedTokenizerBase, "from_pretrained"), _of_class(self._tokenizer)

    def _auto_tokenizers(self, module: ModuleType) -> Iterator[Replacement]:
        yield (module.AutoTokenizer, "from_pretrained"), _of_class(self._tokenizer)

    def _tokenizer(
        self, real: Callable[..., Any], cls: Any, name: Any, *args: Any, **options: Any
    ) -> Any:
        try:
            made = real(cls, name, *args, **options)
            if len(made) >= _FEWEST_TOKENS or os.path.isdir(name):
                return made  # else transformers made an empty one, because it found no files
        except (OSError, ValueError, TypeError, ImportError, UnavailableError):
            pass
        self._note(f"the tokenizer of {name}", "tokens of one word each")
        return _words_tokenizer({"model_max_length": self._positions(name, options), **options})

    def _image_processors(self, module: ModuleType) -> Iterator[Replacement]:
        make = partial(self._processor, "IMAGE_PROCESSOR_MAPPING", module)
        yield (module.AutoImageProcessor, "from_pretrained"), _of_class(make)

    def _feature_extractors(self, module: ModuleType) -> Iterator[Replacement]:
        make = partial(self._processor, "FEATURE_EXTRACTOR_MAPPING", module)
        yield (module.AutoFeatureExtractor, "from_pretrained"), _of_class(make)

    def _processor(
        self,
        mapping: str,
        module: ModuleType,
        real: Callable[..., Any],
        cls: Any,
        name: Any,
        **options: Any,
    ) -> Any:
        """Return the processor of the config's class with its default settings, for images of the
        config's size."""
        try:
            return real(cls, name, **options)
        except (OSError, ValueError):
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(name)
        found = getattr(module, mapping)[type(config)]
        kinds = found.values() if isinstance(found, dict) else found
        processor = next(filter(None, kinds)) if isinstance(found, dict | tuple) else found
        self._note(f"the processor of {name}", "its class's default settings")
        side = getattr(config, "image_size", None)
        size = {"size": {"height": side, "width": side}} if isinstance(side, int) else {}
        return processor(**size)

    def _positions(self, name: Any, options: Mapping[str, Any]) -> int | None:
        """Return the longest text that the model reads, if its config is known and says so."""
        from transformers import AutoConfig

        # a pipeline of diffusers has its text encoder's config beside the tokenizer
        where = options.get("subfolder", "").replace("tokenizer", "text_encoder")
        try:
            config = AutoConfig.from_pretrained(name, subfolder=where)
        except (OSError, ValueError):
            return None
        return getattr(config, "max_position_embeddings", None)

    # ------------------------------------------------------------------ data sets and metrics

    def _data_sets(self, module: ModuleType) -> Iterator[Replacement]:
        yield (module, "load_dataset"), partial(self._loading, module)

    def _loading(self, module: ModuleType, real: Callable[..., Any]) -> Callable[..., Any]:
        def load_dataset(path: str, name: str | None = None, *args: Any, **options: Any) -> Any:
            try:
                return real(path, name, *args, **options)
            except (OSError, ValueError, RuntimeError) as error:
                called = f"{path}, {name}" if name else str(path)
                if self._columns is None:
                    raise UnavailableError(
                        f"the data set {called} is not on this machine; describe its columns, such "
                        f"as --batch-like text=str:400 for texts of 400 words, or "
                        f"--batch-like sentence=str:20,label=int:2"
                    ) from error
            self._note(f"the data set {called}", f"made-up rows of {self._columns}")
            split, streaming = options.get("split"), options.get("streaming", False)
            return self._columns.data_set(module, split, streaming)

        return load_dataset

    def _metrics(self, module: ModuleType) -> Iterator[Replacement]:
        yield (module, "load"), self._loading_metric

    def _loading_metric(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def load(path: str, *args: Any, **options: Any) -> Any:
            try:
                return real(path, *args, **options)
            except (OSError, ValueError, RuntimeError):
                self._note(f"the metric {path}", "no scores")
                return _NoMetric()

        return load


class _NoMetric:
    def compute(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {}

    def add_batch(self, *args: Any, **kwargs: Any) -> None:
        pass

    add = add_batch


def _of_class(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a replacement of a class method. It gets the original, the class and the name."""

    def replace(real: Any) -> Any:
        def method(cls: Any, *args: Any, **options: Any) -> Any:
            if not args and _NAME in options:
                args = (options.pop(_NAME),)
            return replacement(real.__func__, cls, *args, **options)

        return classmethod(method)

    return replace


def _words_tokenizer(options: Mapping[str, Any]) -> Any:
    """Return a tokenizer that makes one token of each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(_WORD_TOKENS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        **_SPECIAL_TOKENS,
        **{key: options[key] for key in ("padding_side", "model_max_length") if key in options},
    )
    made.chat_template = _CHAT
    return made
