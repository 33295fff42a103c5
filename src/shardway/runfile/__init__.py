"""The run file: what is wanted, as data.

Invariant: a user's file is read, never written; every value of the result knows where it came from. This room
must not derive one key from another (that is `shardway.resolve`) nor know anything of torch.
"""
