"""What a job needs from a network, brought into the site's cache before the job is submitted, and checked there.

Invariant: works on a login node, without torch and transformers. Nothing is written outside the named cache, and what
is there and whole is not fetched again.
"""
