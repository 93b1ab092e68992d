"""Run a user's training script unmodified, and measure or predict one of its steps.

launch.py        how the script is started: a file or a module, with or without torchrun
saved_files.py   lets checkpoints be saved and loaded in a temporary folder
steps.py         finds the script's training steps, and stops it after the last wanted one
evaluations.py   finds its evaluations
changes.py       changes that save memory, applied to the script from outside, with their code;
                 techniques.py makes them, late_logits.py the chunked loss
running.py       all of it together: run the script, return the trace
ranks.py         several ranks, one after another
runs.py          what `memlab run` is asked for: the ranks, then changes
"""
