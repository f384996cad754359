"""What is measured: `scripts` run benchmarks, `papers` measure published claims again, `results` holds the JSON."""
