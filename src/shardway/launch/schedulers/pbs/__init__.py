"""PBS Pro and OpenPBS."""
