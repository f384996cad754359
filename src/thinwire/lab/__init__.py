"""Tools around training: emulated networks, plans, comparisons, simulations, studies, reports."""
