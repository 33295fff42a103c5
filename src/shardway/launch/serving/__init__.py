"""Inference servers as jobs: what each server is called with, the request, and the program that watches it in the job.

Shardway has no inference server. It starts vLLM, SGLang or `transformers serve` where the model is, and ends them.
"""
