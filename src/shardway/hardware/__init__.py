"""Hardware: what accelerators and links can do (data with sources), and what this machine is (a probe).

Invariant: an unknown value is `None` and shows as "n/a"; nothing here guesses. No module here
may import torch.
"""
