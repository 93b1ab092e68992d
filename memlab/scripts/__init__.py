"""Run a user's training script unmodified, and measure or predict one of its steps.

launch.py       how the script is started: a file or a module, with or without torchrun
steps.py        finds the script's training steps, and stops it after the last wanted one
isolation.py    keeps its files in a temporary folder, and refuses connections and processes
data.py         stands in for data sets that are not on this machine
running.py      all of it together: run the script, return the trace
"""
