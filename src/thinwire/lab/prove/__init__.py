"""What `thinwire prove` runs: kernels against their definition, the DDP contract in processes, and a benchmark."""
