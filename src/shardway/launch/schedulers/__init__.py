"""What differs between schedulers: how a job asks, how its answers read, and what their words mean."""
