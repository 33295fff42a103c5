"""Container images: fetched from a registry or built on one, as a script that is printed first and then run."""
