"""What `thinwire kernels` times."""
