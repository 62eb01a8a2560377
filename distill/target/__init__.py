"""The frozen target: one class through which training and decoding run the same model."""

from distill.target.loading import load_target
from distill.target.model import Target, TargetConfig, TargetInfo

__all__ = ["Target", "TargetConfig", "TargetInfo", "load_target"]
