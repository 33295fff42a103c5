"""Agents of several nodes that hold one start of the ranks together: who is there, who leads, who was lost.

    notes     what each agent says of itself, and what the one that leads says to all
    roll      who is there, from notes that change
    board     where the notes are: a store that the agent which leads keeps
    lead      the agent that leads: it gathers nodes, begins a start, finds that it is over, ends all
    follow    every other agent: it does what it is told, and knows when nobody leads any more

Each agent writes one note and the one that leads writes the news; nobody writes anything else. Time is measured by
whoever looks, on its own clock, from one change of a note to the next: no clock of another host plays a part.

Invariant: a node takes part in a start only where the news name it; whoever is not sure that somebody leads ends its
ranks. Two that lead (a network that was cut) do no harm: the lease of the run directory (`rundir.lease`) lets one
write. This room must not start ranks, nor know what they compute.
"""
