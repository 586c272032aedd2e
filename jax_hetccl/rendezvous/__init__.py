"""Joining a world, control messages between its members, and opening of data channels.

Nothing here imports JAX: a stand-alone coordinator needs none.
"""
