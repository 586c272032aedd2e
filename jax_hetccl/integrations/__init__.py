"""Programs of others that run unmodified over several clusters. One folder, one program."""
