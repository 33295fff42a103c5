"""Container images: fetched from a registry or built on a base image, as a script that is printed first and then
run.
"""
