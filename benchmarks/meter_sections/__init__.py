"""The sections of benchmarks/meter.py, one module each, and their shared modules.

plans       sizes and kinds of step
observers   the reference, memlab's meter, and torch's MemTracker
tallies     summaries of errors
"""
