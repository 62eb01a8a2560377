"""One preallocated KV cache behind the transformers cache interface, for the target and for drafters.

All layers live in one tensor ``kv[layers, 2, B, H, T, K]``. Row b holds ``lengths_B[b]`` committed tokens in slots
0..length-1 (slot s holds position s); whatever lies behind is scratch: a tree being verified, drafted
entries, padding. Scratch is never zeroed, only masked (a zeroed key would still take weight e^0) and is
overwritten by the next forward. Keeping the accepted path is one gather and one write for all layers.
"""

import torch
from torch import Tensor
from transformers import Cache


def write_slots(layer_2BHTK: Tensor, rows_B1: Tensor, slots_BN: Tensor, k_BNHK: Tensor, v_BNHK: Tensor) -> None:
    """Put keys and values of one layer into each row's own slots."""
    layer_2BHTK[0][rows_B1, :, slots_BN] = k_BNHK
    layer_2BHTK[1][rows_B1, :, slots_BN] = v_BNHK


class KVCache(Cache):
    """Preallocated cache with a length per row.

    Args:
        n_layers: layers to hold.
        batch_size: rows.
        n_kv_heads: key/value heads.
        capacity: slots per row; committed tokens plus the largest scratch must fit.
        head_dim: width of a head.
        dtype: element type.
        device: where the tensor lives.
        bucket: attention sees a multiple of this many slots (masked ones included), so that shapes repeat from
            round to round; 1 where shapes may change freely.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        batch_size: int,
        n_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        bucket: int = 1,
    ):
        super().__init__(layers=[])
        # Zeros, not empty: a masked slot still enters 0 * value, and NaN there would spread.
        self.kv = torch.zeros(n_layers, 2, batch_size, n_kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.lengths_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.longest = 0  # host copy of max(lengths_B): attention reads only that many slots
        self._rows_B1 = torch.arange(batch_size, device=device)[:, None]
        self.bucket = bucket
        self._slots_BN: Tensor | None = None
        self._start: int | None = None  # where a single row's slots begin, known on the host: a slice is enough
        self._view = 0

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.kv.shape[4]

    def begin(self, n_new: int, *, behind: int = 0) -> int:
        """Announce that the next forward writes ``n_new`` entries per row behind its committed ones.

        Args:
            n_new: entries each row writes.
            behind: scratch entries already written behind the committed ones that must be kept (a drafter
                growing its tree depth by depth).

        Returns:
            The number of slots attention will see; masks are built for it.
        """
        start_B1 = self.lengths_B[:, None] + behind
        self._slots_BN = start_B1 + torch.arange(n_new, device=start_B1.device)
        needed = self.longest + behind + n_new
        assert needed <= self.capacity, f"cache holds {self.capacity} slots a row, {needed} needed"
        self._start = self.longest + behind if self.kv.shape[2] == 1 and self.kv.device.type == "cpu" else None
        self._view = min(self.capacity, -(-needed // self.bucket) * self.bucket)
        return self._view

    @property
    def slots_BN(self) -> Tensor:  # noqa: N802 - a tensor, with its shape letters
        """Where the announced entries go, for writers that do so themselves."""
        assert self._slots_BN is not None, "begin() must announce the write first"
        return self._slots_BN

    @property
    def view(self) -> int:
        """Slots attention sees in the announced step."""
        return self._view

    def write(self, layer_idx: int, k_BNHK: Tensor, v_BNHK: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of one layer; return all visible ones, each [B, H, view, K]."""
        slots_BN = self.slots_BN
        layer = self.kv[layer_idx]
        if self._start is not None:
            slots = slice(self._start, self._start + k_BNHK.shape[1])
            layer[0, 0, :, slots].copy_(k_BNHK[0].transpose(0, 1))
            layer[1, 0, :, slots].copy_(v_BNHK[0].transpose(0, 1))
        else:
            write_slots(layer, self._rows_B1, slots_BN, k_BNHK, v_BNHK)
        return layer[0, :, :, : self._view], layer[1, :, :, : self._view]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """The same for keys and values [B, H, N, K], as transformers hands them over."""
        return self.write(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))

    def commit(self, path_BP: Tensor, n_B: Tensor, *, longest: int) -> None:
        """Keep the scratch entries ``path_BP[b, :n_B[b]]`` (indices into the last write), drop the others.

        Args:
            path_BP: indices relative to the first scratch slot, ascending; padding may be anything negative.
            n_B: how many to keep per row (0 leaves a row unchanged).
            longest: the largest committed length afterwards, known on the host.
        """
        keep_BP = path_BP.clamp(min=0)
        source_BP = self.lengths_B[:, None] + keep_BP
        target_BP = self.lengths_B[:, None] + torch.arange(path_BP.shape[1], device=path_BP.device)
        moved = self.kv[:, :, self._rows_B1, :, source_BP]
        self.kv[:, :, self._rows_B1, :, target_BP] = moved
        self.advance(n_B, longest=longest)

    def advance(self, n_B: Tensor, *, longest: int) -> None:
        """Declare the first ``n_B`` scratch entries of each row committed (a chain: nothing has to move)."""
        self.lengths_B = self.lengths_B + n_B
        self.longest = longest
        self._slots_BN = None

    def insert(self, rows: list[int], other: "KVCache") -> None:
        """Overwrite ``rows`` with the rows of ``other`` (same shapes but for batch and capacity)."""
        index = torch.tensor(rows, device=self.kv.device)
        self.kv[:, :, index, :, : other.longest] = other.kv[:, :, :, :, : other.longest]
        self.lengths_B[index] = other.lengths_B
        self.longest = max(self.longest, other.longest)

    def select(self, rows: list[int], *, longest: int) -> "KVCache":
        """Return a cache that holds only ``rows``, whose longest committed length is ``longest``."""
        layers, _, _, heads, capacity, dim = self.kv.shape
        kept = KVCache(
            n_layers=layers,
            batch_size=len(rows),
            n_kv_heads=heads,
            capacity=capacity,
            head_dim=dim,
            dtype=self.kv.dtype,
            device=self.kv.device,
            bucket=self.bucket,
        )
        index = torch.tensor(rows, device=self.kv.device)
        kept.kv[:, :, :, :, :longest] = self.kv[:, :, index, :, :longest]
        kept.lengths_B, kept.longest = self.lengths_B[index], longest
        return kept

    def reserve(self, capacity: int) -> None:
        """Grow to at least ``capacity`` slots a row, keeping what is committed."""
        if capacity <= self.capacity:
            return
        old = self.kv
        shape = list(old.shape)
        shape[4] = capacity
        self.kv = torch.zeros(shape, dtype=old.dtype, device=old.device)
        self.kv[:, :, :, :, : self.longest] = old[:, :, :, :, : self.longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest committed length (transformers interface; masks and positions are always passed in)."""
        return self.longest
