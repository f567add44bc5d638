"""Where common layers are tapped: linear maps, convolutions, tables, normalisation; RULES has all, by exact type.

A rule computes what its layer's forward does, with the layer's parameters as constants, and taps the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from fedveil.release.attention_rule import attention
from fedveil.release.gradient_blocks import Block, Dense, lookups
from fedveil.release.recurrent_rules import cell, recurrent
from fedveil.release.taps import NoRule, Rule, Taps, Use, channel_scale, folded, lookup, outer, places, product, scale

if TYPE_CHECKING:
    from torch import Tensor


def _linear(taps: Taps, layer: nn.Linear, x: Tensor) -> Tensor:
    out = F.linear(x, taps.constant(layer.weight), taps.constant(layer.bias))
    return taps.tap(layer, out, (layer.weight, product(x)), (layer.bias, scale()))


def _bilinear(taps: Taps, layer: nn.Bilinear, left: Tensor, right: Tensor) -> Tensor:
    out = F.bilinear(left, right, taps.constant(layer.weight), taps.constant(layer.bias))

    def weight(slope: Tensor, n: int, left: Tensor, right: Tensor) -> Block:
        return outer(slope, n, (left[..., :, None] * right[..., None, :]).flatten(-2))

    return taps.tap(layer, out, (layer.weight, Use(weight, (left, right))), (layer.bias, scale()))


# --- convolutions ------------------------------------------------------------------------------------------------------


def _convolution(taps: Taps, layer: Any, x: Tensor) -> Tensor:
    if x.dim() != layer.weight.dim():
        raise NoRule
    out: Tensor = layer._conv_forward(x, taps.constant(layer.weight), taps.constant(layer.bias))

    def weight(slope: Tensor, n: int, x: Tensor) -> Block:
        padding = layer._reversed_padding_repeated_twice
        mode = {"zeros": "constant"}.get(layer.padding_mode, layer.padding_mode)
        return _kernel(layer, slope, _windows(F.pad(x, padding, mode=mode), layer, slope.shape[2:]), n)

    return taps.tap(layer, out, (layer.weight, Use(weight, (x,))), (layer.bias, channel_scale()))


def _transposed_convolution(taps: Taps, layer: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if x.dim() != weight.dim():
        raise NoRule
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.dim() - 3]
    sides = weight.dim() - 2
    extra = layer._output_padding(x, output_size, layer.stride, layer.padding, layer.kernel_size, sides, layer.dilation)
    constants = taps.constant(weight), taps.constant(bias)
    out: Tensor = convolve(x, *constants, layer.stride, layer.padding, extra, layer.groups, layer.dilation)

    def by_weight(slope: Tensor, n: int, x: Tensor) -> Block:
        padding = [side for side in reversed(layer.padding) for _ in range(2)]
        return _kernel(layer, x, _windows(F.pad(slope, padding), layer, x.shape[2:]), n)

    return taps.tap(layer, out, (weight, Use(by_weight, (x,))), (bias, channel_scale()))


def _windows(x: Tensor, layer: Any, sizes: torch.Size) -> Tensor:
    """What a kernel sees of padded images [n, channels, *sides] at each of its places: [n, places, channels * kernel].

    On a CPU much faster than `F.unfold`.
    """
    for i, (size, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + i, dilation * (size - 1) + 1, stride).narrow(2 + i, 0, sizes[i])[..., ::dilation]
    sides = range(2, 2 + len(sizes))
    ordered = x.permute(0, 1, *(i + len(sizes) for i in sides), *sides)
    return ordered.reshape(len(x), x.shape[1] * layer.weight[0, 0].numel(), -1).mT


def _kernel(layer: Any, narrow: Tensor, windows: Tensor, n: int) -> Block:
    """The gradient of a kernel [a, b / groups, ...] from values [n, a, *places] and windows [n, places, b * kernel]."""
    left = torch.unflatten(narrow.flatten(2), 1, (layer.groups, -1))
    right = torch.unflatten(windows, 2, (layer.groups, -1)).transpose(1, 2)
    each = (left[:, 0].bmm(right[:, 0]) if layer.groups == 1 else left @ right).flatten(1)
    return Dense(folded(each, n))


# --- tables ------------------------------------------------------------------------------------------------------------


def _embedding(taps: Taps, layer: nn.Embedding, index: Tensor) -> Tensor:
    if layer.scale_grad_by_freq:
        raise NoRule
    out = F.embedding(index, taps.constant(layer.weight), layer.padding_idx)
    if layer.max_norm is not None:  # torch writes it into the table
        size = torch.linalg.vector_norm(out.detach(), layer.norm_type, -1, keepdim=True)
        out = out * torch.where(size > layer.max_norm, layer.max_norm / (size + 1e-7), 1.0)
    return taps.tap(layer, out, (layer.weight, lookup(index, layer.num_embeddings, layer.padding_idx)))


def _embedding_bag(
    taps: Taps, layer: nn.EmbeddingBag, index: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    plain = layer.max_norm is None and not layer.scale_grad_by_freq and layer.mode != "max"
    if not plain or index.dim() != 2 or per_sample_weights is not None:
        raise NoRule
    table, padding = taps.constant(layer.weight), layer.padding_idx
    out = F.embedding_bag(index, table, offsets, mode=layer.mode, padding_idx=padding)
    counted = (torch.ones_like(index) if padding is None else index != padding).to(out.dtype)

    def weight(slope: Tensor, n: int, index: Tensor, counted: Tensor) -> Block:
        shares = counted / counted.sum(1, keepdim=True).clamp_min(1) if layer.mode == "mean" else counted
        return lookups(index.reshape(n, -1), places(slope[:, None] * shares[..., None], n), layer.num_embeddings)

    return taps.tap(layer, out, (layer.weight, Use(weight, (index, counted))))


# --- normalisation and activation --------------------------------------------------------------------------------------


def _layer_norm(taps: Taps, layer: nn.LayerNorm, x: Tensor) -> Tensor:
    return _scaled(taps, layer, F.layer_norm(x, layer.normalized_shape, None, None, layer.eps))


def _rms_norm(taps: Taps, layer: nn.RMSNorm, x: Tensor) -> Tensor:
    return _scaled(taps, layer, F.rms_norm(x, layer.normalized_shape, None, layer.eps))


def _scaled(taps: Taps, layer: Any, normal: Tensor) -> Tensor:
    """Scale and shift along the last dimensions."""
    out, bias, size = normal, getattr(layer, "bias", None), layer.weight.numel()
    out = out * taps.constant(layer.weight)
    out = out if bias is None else out + taps.constant(bias)
    return taps.tap(layer, out, (layer.weight, scale(normal, size=size)), (bias, scale(size=size)))


def _group_norm(taps: Taps, layer: nn.GroupNorm, x: Tensor) -> Tensor:
    return _scaled_channels(taps, layer, F.group_norm(x, layer.num_groups, None, None, layer.eps))


def _instance_norm(taps: Taps, layer: Any, x: Tensor) -> Tensor:
    layer._check_input_dim(x)
    if layer.track_running_stats or x.dim() == layer._get_no_batch_dim():
        raise NoRule
    return _scaled_channels(taps, layer, F.instance_norm(x, eps=layer.eps))


def _batch_norm(taps: Taps, layer: Any, x: Tensor) -> Tensor:
    layer._check_input_dim(x)
    if layer.training or layer.running_mean is None:
        raise NoRule
    return _scaled_channels(taps, layer, F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps))


def _scaled_channels(taps: Taps, layer: Any, normal: Tensor) -> Tensor:
    channels = (-1, *[1] * (normal.dim() - 2))
    out = normal * taps.constant(layer.weight).view(channels)
    out = out if layer.bias is None else out + taps.constant(layer.bias).view(channels)
    return taps.tap(layer, out, (layer.weight, channel_scale(normal)), (layer.bias, channel_scale()))


def _prelu(taps: Taps, layer: nn.PReLU, x: Tensor) -> Tensor:
    out = F.prelu(x, taps.constant(layer.weight))

    def single(slope: Tensor, n: int, x: Tensor) -> Block:
        return Dense((slope * x.clamp_max(0)).reshape(n, -1).sum(1, keepdim=True))

    return taps.tap(layer, out, (layer.weight, Use(single, (x,)) if layer.num_parameters == 1 else channel_scale(x.clamp_max(0))))


RULES: Mapping[type, Rule] = {
    nn.Linear: _linear,
    nn.Bilinear: _bilinear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed_convolution),
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding_bag,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    nn.PReLU: _prelu,
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM), recurrent),
    **dict.fromkeys((nn.RNNCell, nn.GRUCell, nn.LSTMCell), cell),
    nn.MultiheadAttention: attention,
}
