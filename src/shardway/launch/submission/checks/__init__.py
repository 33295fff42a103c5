"""What can be known to be wrong with a job before it waits in a queue.

`numbers`: against the profile of the site. `words`: names, options, variables. `run_file`: its own rules, for the ranks
of the job. `commands`: the program and its Python. `places`: files and folders. The last two look at the host (`look`),
and know the folder that is submitted (`code`).
"""
