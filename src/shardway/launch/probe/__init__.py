"""What a machine says of itself, as a site profile for its user to keep."""
