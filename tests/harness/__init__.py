"""Runs one table of cases in one stock-JAX world and across clusters, and compares them.

Layers, top to bottom: ``batches`` (many cases at a time), ``cells`` (what runs where) and ``judge`` (the verdict) use
``pool`` (worlds and their lifetime), which uses ``process`` (one worker process). Inside a worker, ``worker`` runs
cases with ``env`` and answers with ``results``. ``layout`` and ``case`` are plain data that both sides share.
"""
