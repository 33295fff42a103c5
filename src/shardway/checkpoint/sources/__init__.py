"""Weights from elsewhere: safetensors, checkpoints of torch.distributed, files of torch.save, those of other runs.

Invariant: a source is recognised by what it is, and described without reading its numbers; no pickle is read that may
name anything but plain data. This room must not know models, nor write.
"""
