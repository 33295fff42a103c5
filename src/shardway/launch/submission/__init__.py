"""From the user's request to an attempt at a scheduler: the request, its problems, the order, the job.

Invariant: all that can be found before the queue is reported before the queue. How a run ended is judged in
`launch.runs`.
"""
