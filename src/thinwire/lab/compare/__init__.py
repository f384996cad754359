"""`thinwire compare`: trains the same model by several recipes on an emulated slow network, and measures each."""
