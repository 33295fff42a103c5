"""`python -m shardway`: the same as the command `shardway`."""

from shardway.cli.entry import main

main()
