"""RDMA devices as Python looks at them: what is there, how near it is, and which port each rank takes.

`hca` (HETCCL_IB_HCA), `ports` (a port, its GIDs, what speaks against it), `places` (distances) and `choose` (who takes
what) are pure; `discover` asks the native module and /sys, `bindings` asks pyverbs.
"""
