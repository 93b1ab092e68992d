"""What benchmarks/meter.py is made of: one module for each section, and what they share.

plans       how much is run, and on which kinds of step
observers   the truth, memlab's meter, and torch's MemTracker
tallies     how far observers are off, counted and in words
"""
