"""Training: one run, from a config to an exported drafter."""
