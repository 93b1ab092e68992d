"""Each technique as its paper has it: one file, one sitting, torch alone.

These are the solutions of the lessons, and what the library's own versions are tested against. What
a library version adds (speed, fewer bytes, more cases) stands at the head of its file.
"""
