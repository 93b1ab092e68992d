"""The block size of quantized tensors, in optimizer state and in saved tensors."""

BLOCK_SIZE = 256  # elements that share a scale
