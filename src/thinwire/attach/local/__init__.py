"""The parts of `local_steps`: settings and presets, fragments, schedule, outer optimizers, rounds, state, autosave."""
