"""Benchmarks: scenarios that run us and a peer in one process, in turn."""
