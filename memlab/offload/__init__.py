"""Offloading: keep activations, optimizer state, gradients and weights on the host or on disk."""

from memlab.offload.activations import offloaded_activations
from memlab.offload.disk import DiskStore
from memlab.offload.layers import StreamedLayers, stream_layers
from memlab.offload.optimizer import OffloadedOptimizer
from memlab.offload.stores import HostStore, Store, StoreError, Traffic

__all__ = [
    "DiskStore",
    "HostStore",
    "OffloadedOptimizer",
    "Store",
    "StoreError",
    "StreamedLayers",
    "Traffic",
    "offloaded_activations",
    "stream_layers",
]
