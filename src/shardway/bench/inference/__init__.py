"""How fast a model answers: static batches, offline throughput and served streams, in one schema with SGLang's and
vLLM's names.

Invariant: torch and engines are imported only by the backend that needs them; nothing here prints.
"""
