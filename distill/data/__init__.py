"""Training data: sources, answers written by the target, masks, shards, packing."""

from distill.data.batches import Batches
from distill.data.config import DataConfig
from distill.data.conversation import Conversation
from distill.data.masks import Supervised, supervise
from distill.data.prepare import prepare, write_part
from distill.data.prepared import PreparedData, load_prepared
from distill.data.progress import Progress, stderr_progress
from distill.data.show import render_mask
from distill.data.template import ChatTemplate

__all__ = [
    "Batches",
    "ChatTemplate",
    "Conversation",
    "DataConfig",
    "PreparedData",
    "Progress",
    "Supervised",
    "load_prepared",
    "prepare",
    "render_mask",
    "stderr_progress",
    "supervise",
    "write_part",
]
