"""Stand in for what a script loads from the Hugging Face Hub and this machine does not have.

weights      random ones (fake in a dry run) in the shapes of the config, loaded as a file's
             are: quantized, cast, and put where the script asks
configs      of the file or folder that `--config NAME=PATH` names; without one, the script
             stops with a sentence
tokenizers   one that makes a token of each word (word_tokenizer.py)
processors   of the class that the script or the config names, with its default settings
data sets    of rows that `--batch-like` describes; without it, the script stops
metrics      of `evaluate`, that compute nothing
"""

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from memlab.world.data.columns import Columns, recording
from memlab.world.data.word_tokenizer import Template, template_of, words_tokenizer
from memlab.world.entering import Replacements

Note = Callable[[str, str], None]  # (the missing thing, its stand-in)
_NAME = "pretrained_model_name_or_path"
FROM_A_FILE = "_has_weights_from_a_file"  # attribute of a transformers model that was loaded
_FEWEST_TOKENS = 100  # of any tokenizer that has its files, beside special ones


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

    def stand_ins(self) -> Replacements:
        images = ("image_processing_auto", "IMAGE_PROCESSOR_MAPPING")
        features = ("feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING")
        return {
            "config": _of_class(self._config_dict),
            "transformers_model": _of_class(self._model_of_transformers),
            "diffusers_model": _of_class(self._model_of_diffusers),
            "tokenizer": _of_class(self._tokenizer),
            "image_processor": _of_class(partial(self._auto_processor, images)),
            "feature_extractor": _of_class(partial(self._auto_processor, features)),
            "processor": _of_class(self._own_processor),
            "data_set": self._loading,
            "recording": _reading_recordings,
            "metric": self._loading_metric,
        }

    # ------------------------------------------------------------------ configs

    def _config_dict(self, real: Callable[..., Any], cls: type, name: Any, **options: Any) -> Any:
        if (given := self._configs.get(str(name))) is not None:
            return real(cls, given, **options)
        try:
            return real(cls, name, **options)
        except OSError as error:
            raise UnavailableError(
                f"the config of {name} is not on this machine; pass --config {name}=PATH, with a "
                f"config.json or its folder"
            ) from error

    # ------------------------------------------------------------------ weights

    def _model_of_transformers(
        self, real: Callable[..., Any], cls: Any, name: Any, *args: Any, **options: Any
    ) -> Any:
        try:
            loaded = real(cls, name, *args, **options)
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            setattr(model, FROM_A_FILE, name is not None)
            return loaded
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
        setattr(model, FROM_A_FILE, True)
        return model

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

    def _tokenizer(
        self, real: Callable[..., Any], cls: Any, name: Any, *args: Any, **options: Any
    ) -> Any:
        try:
            made = real(cls, name, *args, **options)
            # Offline transformers 5 gives gpt2 at most 4 tokens, without an error
            # (test_a_tokenizer_of_special_tokens_alone_is_replaced).
            own = len(made) - len(made.get_added_vocab())
            if own >= _FEWEST_TOKENS or os.path.isdir(name):
                return made  # else transformers made an empty one, because it found no files
        except (OSError, ValueError, TypeError, ImportError, UnavailableError):
            pass
        config = _config_beside(name, options)
        positions = getattr(config, "max_position_embeddings", None)
        kind, template = _template_of(cls, config)
        added = f"with the special tokens of {kind}" if template else "without special tokens"
        self._note(f"the tokenizer of {name}", f"tokens of one word each, {added}")
        return words_tokenizer(
            {"model_max_length": positions, **options}, template, length=_vocabulary_of(config)
        )

    def _auto_processor(
        self,
        mapping: tuple[str, str],
        real: Callable[..., Any],
        cls: Any,
        name: Any,
        **options: Any,
    ) -> Any:
        """Return the processor of the config's class, as `_processor` makes it."""
        try:
            return real(cls, name, **options)
        except (OSError, ValueError):
            config = _config_of(name)
        module, name_of_mapping = mapping
        found = getattr(sys.modules[f"transformers.models.auto.{module}"], name_of_mapping)
        found = found[type(config)]
        kinds = found.values() if isinstance(found, dict) else found
        kind = next(filter(None, kinds)) if isinstance(found, dict | tuple) else found
        return self._processor(kind, name, config)

    def _own_processor(
        self, real: Callable[..., Any], cls: Any, name: Any, *args: Any, **options: Any
    ) -> Any:
        try:
            return real(cls, name, *args, **options)
        except (OSError, ValueError):
            return self._processor(cls, name, _config_of(name))

    def _processor(self, kind: Any, name: Any, config: Any) -> Any:
        """Return a processor with its default settings, for images of the config's size."""
        self._note(f"the processor of {name}", "its class's default settings")
        side = getattr(config, "image_size", None)
        return kind(**({"size": {"height": side, "width": side}} if isinstance(side, int) else {}))

    # ------------------------------------------------------------------ data sets and metrics

    def _loading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def load_dataset(path: str, name: str | None = None, *args: Any, **options: Any) -> Any:
            try:
                return real(path, name, *args, **options)
            except (OSError, ValueError, RuntimeError) as error:
                called = f"{path}, {name}" if name else str(path)
                if self._columns is None:
                    raise UnavailableError(
                        f"the data set {called} is not on this machine; describe its columns, such "
                        f"as --batch-like text=str:400 for texts of 400 words, or "
                        f"--batch-like sentence=str:20,label=int:2; memlab run --help lists the "
                        f"kinds of columns"
                    ) from error
            self._note(f"the data set {called}", f"made-up rows of {self._columns}")
            split, streaming = options.get("split"), options.get("streaming", False)
            return self._columns.data_set(sys.modules["datasets"], split, streaming)

        return load_dataset

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


def _reading_recordings(real: Callable[..., Any]) -> Callable[..., Any]:
    def decode_example(audio: Any, value: Any, *args: Any, **options: Any) -> Any:
        made_up = recording(value, audio.sampling_rate)
        return real(audio, value, *args, **options) if made_up is None else made_up

    return decode_example


def _of_class(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a replacement of a class method. It gets the original, the class and the name."""

    def replace(real: Any) -> Any:
        def method(cls: Any, *args: Any, **options: Any) -> Any:
            if not args and _NAME in options:
                args = (options.pop(_NAME),)
            return replacement(real.__func__, cls, *args, **options)

        return classmethod(method)

    return replace


def _config_of(name: Any, **where: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, **where)


def _config_beside(name: Any, options: Mapping[str, Any]) -> Any:
    """Return the config of the model whose tokenizer this is, if it is known."""
    # a pipeline of diffusers has its text encoder's config beside the tokenizer
    where = options.get("subfolder", "").replace("tokenizer", "text_encoder")
    try:
        return _config_of(name, subfolder=where)
    except (OSError, ValueError):
        return None


def _vocabulary_of(config: Any) -> int | None:
    """Return the number of tokens of a config's text model; None if it has none, or several."""
    try:
        return getattr(config.get_text_config(), "vocab_size", None)
    except (AttributeError, ValueError):
        return None


def _template_of(cls: Any, config: Any) -> tuple[str, Template | None]:
    """Return the tokenizer class that the script or the config names, and the tokens that it adds
    to texts, if a tokenizer of this class without a vocabulary shows them."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    named = TOKENIZER_MAPPING.get(type(config), None)
    for kind in (cls, *(named if isinstance(named, tuple) else (named,))):
        try:
            tokenizer = kind()
        except Exception:  # most classes need files
            continue
        if template := template_of(tokenizer):
            return kind.__name__, template
    return "", None
