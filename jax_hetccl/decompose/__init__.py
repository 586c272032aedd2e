"""One file per collective: how it becomes local collectives and exchanges."""
