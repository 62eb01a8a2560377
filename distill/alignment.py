"""Which input, label and mask belong together, per method and step. The only shifts in the project.

At decoding time a draft starts when the target has just emitted token t_{i+1} with feature f_i. So training
position i of EAGLE-3 step k

* reads the embedding of t_{i+1+k},
* is compared with the target's distribution at i+1+k, which speaks about t_{i+2+k},
* counts iff t_{i+1}, ..., t_{i+2+k} were all written by the target, in one document.

The last prompt position thus trains the first draft call (its t_{i+1} is the first answer token), and
nothing is trained that would never be drafted: what follows the end of a turn, or the next document.
"""

import torch
from torch import Tensor

from distill.types import Batch


def shift_left(x_BL: Tensor, by: int) -> Tensor:
    """x[:, i + by] at column i; the freed columns are 0 (False). Trailing axes are carried along."""
    if by == 0:
        return x_BL
    out = torch.zeros_like(x_BL)
    out[:, : max(0, x_BL.shape[1] - by)] = x_BL[:, by:]
    return out


def input_ids(batch: Batch, step: int) -> Tensor:
    """Token read at position i of recurrent step ``step``: t_{i+1+step}, [B, L]."""
    return shift_left(batch.ids_BL, 1 + step)


def generated_run(batch: Batch, first: int, last: int) -> Tensor:
    """True at i where t_{i+first} .. t_{i+last} were all written by the target in i's document, [B, L]."""
    mask = (batch.doc_BL >= 0).clone()
    for by in range(first, last + 1):
        # Documents are numbered from 0, so shifting in 0 is told apart by the loss mask, which is False there.
        mask &= shift_left(batch.loss_mask_BL, by) & (shift_left(batch.doc_BL, by) == batch.doc_BL)
    return mask


def recurrent_mask(batch: Batch, step: int) -> Tensor:
    """EAGLE-1 (step 0) and EAGLE-3 step k: position i counts iff t_{i+1} .. t_{i+2+k} are generated."""
    return generated_run(batch, 1, 2 + step)


def teacher_row(shift: int) -> int:
    """Offset from a position to the target row that speaks about token t+shift."""
    return shift - 1
