"""`thinwire plan` and `thinwire probe`: predicted step times, the recipe that pays, and measured networks."""
