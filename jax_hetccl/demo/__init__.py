"""What `hetccl demo` runs: a small character-level transformer trained by two clusters of different sizes.

`corpus`, `model` and `training` are stock JAX and Flax and do not import jax_hetccl, so that `reference`
can run the very same steps in one JAX world without it. `worker` is the program of every process of the
two clusters. `main` starts both runs and looks after them; `compare` decides whether they agree; `report`
shows it.
"""
