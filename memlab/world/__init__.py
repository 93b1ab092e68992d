"""What a script or a dry run may see of the machine, and what it may do to it.

table         each replaced name, in table.csv: the owner, what stands in, and why
entering      replaces them, for the threads that asked: `enter`
isolation     the files, processes and network of a script, and a list of what it tried
files         files that a script writes, in a temporary folder
programs      that a script may have
processes     of Python, and ranks: started and messages have their parts
extensions    that a script compiles
data          data sets, weights and tokenizers that this machine lacks
confinement   the child process of `memlab run`, which confines itself before the script begins
landlock      the kernel's own rules: files, TCP connections, signals
seccomp       which system calls of the child a supervisor answers
supervisor    answers them: what Landlock does not cover, and a list of what was refused

Stand-ins of devices and of values need the meter, so they are in memlab/dry_runs and
memlab/prediction. The table and the last four do not import torch.
"""

UNLISTED = "unlisted"  # the folder that gets what memlab itself writes, such as torch's caches
