"""One order of exchanges for a whole program: buckets, starts, dones and the token that ties them together."""
