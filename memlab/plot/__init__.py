"""Pictures of runs: where the bytes of a step are, and where the holes between them.

    timeline(trace)    one step from left to right, stacked by category, and its peak taken apart
    breakdown(traces)  a bar for each of several runs: what it holds at its peak, what it saves
    blocks(blocks)     what the caching allocator reserves for a run, and the holes in it

A long run has more events than a picture has columns of dots. A column then shows the fullest
moment of its share of the events, never a mean, so the peak is always drawn. Texts don't meet,
however short a phase or long a name. The figures are made without pyplot: no backend or window is
touched, and matplotlib's settings stay as the user has them.
"""

from memlab.plot.breakdowns import breakdown
from memlab.plot.fragmentation import blocks
from memlab.plot.page import COLOURS, save
from memlab.plot.timelines import timeline

__all__ = ["COLOURS", "blocks", "breakdown", "save", "timeline"]
