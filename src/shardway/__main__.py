"""`python -m shardway`: the same as the command `shardway`."""

from shardway.cli.main import main

main()
