"""Real processes on a slow network on one machine: rate, delay, jitter, loss, schedules."""
