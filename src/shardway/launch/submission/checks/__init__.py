"""What can be known to be wrong with a job before it waits in a queue.

`numbers`: against the profile of the site. `words`: names, options, variables. `places`: files and folders.
"""
