"""Numbers as one bit each, eight to a byte, with a scale for every block of them."""

from __future__ import annotations

from functools import cache

import torch

BLOCK = 64  # elements that share a scale: 1 + 16/64 = 1.25 bits an element are sent, 1/25.6 of fp32
SCALE_BYTES = 2  # bfloat16, which has the range of fp32; what rounding takes away is in the error like all else
BYTES_PER_BLOCK = BLOCK // 8 + SCALE_BYTES

# A number of eight bytes, each 0 or 1, times this has them as the bits of its highest byte: byte i is moved to bit
# 56 + i, and no two of the 64 products meet in a bit.
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """Bytes (N / 8) of float values (N), N a multiple of 8: bit i % 8 of byte i / 8 is 1 where value i is 0 or more."""
    eights = (values >= 0).view(torch.uint8).view(torch.int64)  # (N / 8)
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def unpack_signs(packed: torch.Tensor) -> torch.Tensor:
    """Float32 values (8 B) of bytes (B): 1 for a bit that is set, else -1."""
    return _table(packed.device)[packed.int()].view(-1)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Bytes (N / 64 * 10) of float32 values (N), N a multiple of 64: all signs, then all scales.

    A block's scale is the mean of its absolute values, which of all scales leaves the least error, by least squares.
    """
    scales = values.view(-1, BLOCK).abs().mean(dim=1).to(torch.bfloat16)
    return torch.cat([pack_signs(values), scales.view(torch.uint8)])


def decode(encoded: torch.Tensor) -> torch.Tensor:
    """Float32 values (N) of `encode`'s bytes."""
    bits = encoded.numel() // BYTES_PER_BLOCK * (BLOCK // 8)
    scales = encoded[bits:].clone().view(torch.bfloat16).float()  # a clone is aligned
    return (unpack_signs(encoded[:bits]).view(-1, BLOCK) * scales[:, None]).view(-1)


@cache
def _table(device: torch.device) -> torch.Tensor:
    """What each byte stands for, (256, 8)."""
    every = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (every & 1).float() * 2 - 1
