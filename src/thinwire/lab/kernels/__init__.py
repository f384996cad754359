"""`thinwire kernels`: the time of every kernel beside a copy and beside the torch code it replaces."""
