"""The frozen target: one class through which training and decoding run the same model."""

from distill.target.fast import FastTarget
from distill.target.info import TargetConfig, TargetInfo
from distill.target.loading import load_target, target_folder
from distill.target.model import Target

__all__ = ["FastTarget", "Target", "TargetConfig", "TargetInfo", "load_target", "target_folder"]
