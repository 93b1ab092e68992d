"""Training steps that other people measured on GPUs, rebuilt from their descriptions."""
