"""Sites: what a machine offers a job, as checked data. One TOML profile a site, and the default, `laptop`.

Invariant: a loaded profile holds facts only, none of them guessed; an unknown fact is `None`. No module here may
import torch, talk to a scheduler, or change the machine.
"""
