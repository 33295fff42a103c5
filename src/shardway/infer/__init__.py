"""What a trained model is used for: it is opened from a run, a folder or the hub, it generates, chats and is evaluated.

Invariant: a run directory and a model's folder are only read. Tokens are those of `transformers.generate`; nothing here
trains, and nothing is printed here.
"""
