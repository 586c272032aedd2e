"""Starting the processes of all clusters on one machine and looking after them.

`spec` and `environment` are pure (text in, plans out); `output`, `process` and `supervisor` touch the system.
Nothing here imports JAX: the launcher must work whatever state the programs it starts are in.
"""

from jax_hetccl.launch.environment import ProcessPlan, plan_processes
from jax_hetccl.launch.output import Console, Sink
from jax_hetccl.launch.spec import ClusterSpec, LaunchError, parse_clusters, parse_pythons
from jax_hetccl.launch.supervisor import Ended, Outcome, Supervisor

__all__ = [
    "ClusterSpec",
    "Console",
    "Ended",
    "LaunchError",
    "Outcome",
    "ProcessPlan",
    "Sink",
    "Supervisor",
    "parse_clusters",
    "parse_pythons",
    "plan_processes",
]
