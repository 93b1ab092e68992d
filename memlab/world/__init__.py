"""What a script may do to the machine.

confinement   the command's child process, which confines itself before the script's first line
landlock      the kernel's own rules: files, TCP connections, signals
seccomp       which system calls of the child a supervisor answers
supervisor    answers them: what Landlock does not cover, and a list of what was refused

None of it imports torch.
"""

UNLISTED = "unlisted"  # the folder that gets what memlab itself writes, such as torch's caches
