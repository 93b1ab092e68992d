"""What benchmarks/gpu.py is made of: one module for each section, and what they share.

configurations   the steps that are predicted and recorded, as builders
jobs             what runs in a process of its own: on the GPU, or rehearsed without one
recorder         a step recorded by CUDA's own allocator
streams          two streams of blocks held against each other
archive          recorded histories, kept as fixtures for tests
bench            how a section asks for jobs, tells and keeps what it finds
"""
