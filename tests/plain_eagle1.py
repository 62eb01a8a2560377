"""EAGLE-1 and HASS written out for one document, dense: no packing, no cache, no log-sum-exp.

HASS (arXiv:2408.15766, section 3.2) says what is seen by the position q of the query. In forward m the feature at
position j has m + 1 versions: the target's own (0), and what forward v - 1 predicted for j (v = 1..m). Query q reads
the newest one of its own; a key at distance d = q - j is the one of version m - d, from d = m on the target's own::

    forward 2, query 5:   key      0  1  2  3  4  5
                          version  0  0  0  0  1  2

The library counts by where a draft starts, i = q - m. Forward 0 is EAGLE-1 (arXiv:2401.15077).
"""

import math

import torch


class PlainEagle1:
    """Shares the parameters of a drafter and nothing else; sizes, theta and epsilon come from the target's config."""

    def __init__(self, drafter, target):
        self.w = dict(drafter.named_parameters())
        self.n_layers = drafter.config.num_layers
        hf = target.config_hf
        self.heads, self.groups = hf.num_attention_heads, hf.num_key_value_heads
        self.dim = getattr(hf, "head_dim", None) or hf.hidden_size // self.heads
        self.eps, self.theta = hf.rms_norm_eps, hf.rope_parameters["rope_theta"]
        self.table = target.model.get_input_embeddings().weight.detach()
        self.head = target.model.get_output_embeddings().weight.detach()

    def rms(self, x, name):
        return x * self.w[name] / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def rope(self, x_QHK):
        """Rotation at positions 0, 1, ... as a product of complex numbers; angles in fp32, as the target's."""
        half = self.dim // 2
        frequency = 1.0 / (self.theta ** (torch.arange(0, self.dim, 2).float() / self.dim))
        angle = torch.arange(len(x_QHK)).float()[:, None] * frequency
        turn = torch.complex(angle.cos().to(x_QHK.dtype), angle.sin().to(x_QHK.dtype))[:, None]
        turned = torch.complex(x_QHK[..., :half], x_QHK[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def forwards(self, ids: list[int], features_LD: torch.Tensor, n: int) -> list[torch.Tensor]:
        """Outputs of forwards 0..n-1, each [L-1, D]; row q of forward m is the draft started at q - m (none: q < m)."""
        queries = len(ids) - 1
        embedded = self.table[ids[1:]].to(features_LD.dtype)
        distance = torch.arange(queries)[:, None] - torch.arange(queries)
        newest, found = features_LD[:-1], []
        memory = [([], []) for _ in range(self.n_layers)]  # per layer the keys and values of every version
        for m in range(n):
            version = (m - distance).clamp(0, m)
            x = torch.cat([embedded, newest], -1) @ self.w["fc.weight"].T
            x = x + self.w["fc.bias"] if "fc.bias" in self.w else x
            for layer, (keys, values) in enumerate(memory):
                x = self.layer(f"layers.{layer}.", x, keys, values, version, distance, first=layer == 0)
            found.append(x)
            newest = torch.cat([torch.zeros_like(x[:1]), x[:-1]]).detach()
        return found

    def layer(self, p, x, keys, values, version, distance, *, first):
        def split(name, heads):
            return (normed @ self.w[f"{p}self_attn.{name}_proj.weight"].T).view(len(x), heads, self.dim)

        normed = x if first else self.rms(x, p + "input_layernorm.weight")
        keys.append(self.rope(split("k", self.groups)))
        values.append(split("v", self.groups))
        at = torch.arange(len(x))
        seen_k, seen_v = (torch.stack(rows)[version, at] for rows in (keys, values))  # [query, key, group, K]
        q = self.rope(split("q", self.heads)).view(len(x), self.groups, -1, self.dim)
        scores = torch.einsum("qghk,qjgk->qghj", q, seen_k) / math.sqrt(self.dim)
        weights = scores.masked_fill(distance[:, None, None] < 0, float("-inf")).softmax(-1)
        attended = torch.einsum("qghj,qjgk->qghk", weights, seen_v).flatten(1)
        h = x + attended @ self.w[p + "self_attn.o_proj.weight"].T
        y = self.rms(h, p + "post_attention_layernorm.weight")
        gate, up = (y @ self.w[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return h + (gate * torch.sigmoid(gate) * up) @ self.w[p + "mlp.down_proj.weight"].T
