"""Decoder-only models of `transformers`, and weights in the format of the hub, in and out.

Invariant: transformers and safetensors are imported when a model is built or a file is opened, never before. No rank
reads more of a weight than it holds. This package must not write files: that is `shardway.checkpoint.export`.
"""
