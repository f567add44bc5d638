"""Where attention is tapped: at its projections, which `nn.MultiheadAttention` computes inside, where no hook reaches."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from fedveil.release.taps import NoRule, Taps, product, scale

if TYPE_CHECKING:
    from torch import Tensor


_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


def attention(taps: Taps, layer: nn.MultiheadAttention, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """The layer's forward. `is_causal` is a hint about `attn_mask`, which serves as it is."""
    bound = _SIGNATURE.bind(layer, *arguments, **options)
    bound.apply_defaults()
    said = bound.arguments
    query, mask = said["query"], said["attn_mask"]
    added_keys = layer.bias_k is not None or layer.add_zero_attn
    if query.dim() != 3 or added_keys or (said["is_causal"] and mask is None):
        raise NoRule
    q, k, v = (_heads(layer, part) for part in _projected(taps, layer, query, said["key"], said["value"]))
    hidden = _mask(layer, mask, said["key_padding_mask"], q)
    scores = (q / math.sqrt(layer.head_dim)) @ k.mT
    weights = torch.softmax(scores if hidden is None else scores + hidden, -1)
    weights = F.dropout(weights, layer.dropout, layer.training)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    mixed = mixed if layer.batch_first else mixed.transpose(0, 1)
    last = layer.out_proj
    out = F.linear(mixed, taps.constant(last.weight), taps.constant(last.bias))
    out = taps.tap(layer, out, (last.weight, product(mixed)), (last.bias, scale()))
    if not said["need_weights"]:
        return out, None
    return out, weights.mean(1) if said["average_attn_weights"] else weights


def _projected(taps: Taps, layer: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Query, key and value after their projections; one product for those that are one tensor."""
    size, bias, packed = layer.embed_dim, layer.in_proj_bias, layer.in_proj_weight
    inputs = query, key, value
    parts: list[Tensor] = []
    while len(parts) < 3:
        start = stop = len(parts)
        x, table = inputs[start], packed if packed is not None else getattr(layer, f"{'qkv'[start]}_proj_weight")
        while stop == start or (packed is not None and stop < 3 and inputs[stop] is x):
            stop += 1
        rows, around = slice(start * size, stop * size), (start * size, (3 - stop) * size)

        def widened(slope: Tensor, around: tuple[int, int] = around) -> Tensor:
            return F.pad(slope, around) if any(around) else slope

        weight, shift = taps.constant(table), taps.constant(bias)
        out = F.linear(x, weight if packed is None else weight[rows], None if bias is None else shift[rows])
        use = product(x) if packed is None else product(x, widened)
        parts += torch.split(taps.tap(layer, out, (table, use), (bias, scale(slopes=widened))), size, -1)
    return parts


def _heads(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """[batch, heads, tokens, width] from the layer's own order."""
    x = x if layer.batch_first else x.transpose(0, 1)
    return torch.unflatten(x, 2, (layer.num_heads, layer.head_dim)).transpose(1, 2)


def _mask(layer: nn.MultiheadAttention, mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to the scores [batch, heads, tokens, tokens]; True hides, as in the layer."""

    def added(hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.bool:
            return torch.zeros_like(hidden, dtype=like.dtype).masked_fill(hidden, -math.inf)
        return hidden.to(like.dtype)

    total = None
    if mask is not None:
        total = added(mask)
        total = torch.unflatten(total, 0, (-1, layer.num_heads)) if mask.dim() == 3 else total
    if padding is not None:
        hidden = added(padding)[:, None, None, :]
        total = hidden if total is None else total + hidden
    return total
