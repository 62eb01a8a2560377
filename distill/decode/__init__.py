"""The one decode loop: propose -> verify -> commit."""

from distill.decode.loop import Decoder, Engine
from distill.decode.records import Generation, Request, StepRecord

__all__ = ["Decoder", "Engine", "Generation", "Request", "StepRecord"]
