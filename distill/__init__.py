"""Draftsmith: train the small half of speculative decoding and prove what it gains."""

__version__ = "0.1.0"
