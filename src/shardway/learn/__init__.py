"""Lessons: a path of ten, from one device to a chain of jobs on a cluster, and a check of each.

Invariants:
- Without torch: a lesson is printed, its files are placed and its check is made on a login node.
- A file that a learner changed is never written again, and a check changes nothing.
- A check rests on what runs have recorded (events, resolved run, checkpoints with checksums, attempts, traces), never
  on a name or a note that a lesson was read.
- No figure of a lesson is written down: it is measured on the learner's machine, and planned when it is shown.
"""
