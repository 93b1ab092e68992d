"""Plots of memory: a step's bytes over time, comparisons of runs, and fragmentation.

    timeline(trace)    one step from left to right, stacked by category, with its peak in a table
    breakdown(traces)  one bar per run: its peak by category, and its savings
    blocks(blocks)     the caching allocator's reserved memory over a run, and its free blocks

A long run has more events than a plot has columns of pixels. Each column shows the maximum over its
events, so the peak is always visible. Labels never overlap. Figures do not use pyplot, so no
backend or window is touched and matplotlib's settings stay unchanged.
"""

from importlib.util import find_spec

if find_spec("matplotlib") is None:
    raise ModuleNotFoundError(
        "memlab.plot draws with matplotlib, which is not installed; run pip install matplotlib",
        name="matplotlib",
    )

from memlab.plot.breakdowns import breakdown
from memlab.plot.fragmentation import blocks
from memlab.plot.page import COLOURS, save
from memlab.plot.timelines import timeline

__all__ = ["COLOURS", "blocks", "breakdown", "save", "timeline"]
