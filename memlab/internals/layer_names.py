"""Names of layers that usually keep their precision when the other layers of a model lose some."""

# Layers that compute logits.
OUTPUT_LAYERS = frozenset({"classifier", "embed_out", "lm_head", "score", "unembedding"})


def is_inner(name: str) -> bool:
    """Return whether a layer of this name is no output layer."""
    return name.rpartition(".")[2] not in OUTPUT_LAYERS
