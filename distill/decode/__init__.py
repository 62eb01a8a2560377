"""The one decode loop: propose -> verify -> commit."""

from distill.decode.loop import Decoder, Engine
from distill.decode.records import Generation, Request, StepRecord
from distill.decode.verify import RULES, Typical, check_thresholds, lossless

__all__ = [
    "RULES",
    "Decoder",
    "Engine",
    "Generation",
    "Request",
    "StepRecord",
    "Typical",
    "check_thresholds",
    "lossless",
]
