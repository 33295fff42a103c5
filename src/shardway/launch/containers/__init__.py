"""Container runtimes: how a rank's command is wrapped, and what a job has to set up first."""
