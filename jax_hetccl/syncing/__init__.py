"""Combining arrays of a jitted program over all clusters, each in its own sharding.

``shares`` (who holds what, and the plans; pure) <- ``spec`` (what is combined, and in which exchanges) <- ``agree``
(layouts of the other clusters) <- ``shard`` (what one device computes) <- ``partition`` (the operation JAX sees).
"""
