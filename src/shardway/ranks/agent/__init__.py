"""Watches over the ranks of a node: what each does, which of them hangs, whether they start again.

    page      what a rank does now, in shared memory          patience  how long an activity may take
    stacks    where every thread of a rank is                 hang      which ranks hang, from what the pages say
    recorder  the last collectives of a rank, asked for         record    these as values
    collectives  in which of them ranks wait, and for whom
    watch     looks at the pages and ends ranks that hang     policy    whether the ranks start again

Invariant: `hang`, `patience`, `policy`, `record` and `collectives` are pure; only `watch` touches processes, and only
those that this process has started. No clock of another host plays a part. This room must not import torch nor know
what the ranks compute.
"""
