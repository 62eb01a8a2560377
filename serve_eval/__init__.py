"""Measuring and showing: benchmarks, verification, reports. Imports distill and is never imported by it."""
