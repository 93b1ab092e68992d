"""The sections of benchmarks/gpu.py, one module each, and their shared modules.

configurations   builders of the predicted and recorded steps
jobs             jobs that run in their own process on the GPU, or as a rehearsal without one
recorder         records a step with CUDA's memory history
streams          compares a predicted and a recorded stream of blocks
archive          recorded histories, stored as test fixtures
bench            submits a section's jobs, prints progress and stores results
"""
