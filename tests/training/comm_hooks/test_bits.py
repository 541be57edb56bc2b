"""Signs eight to a byte, and scales by block."""

from __future__ import annotations

import pytest
import torch

from finetune.training.comm_hooks.bits import BLOCK, BYTES_PER_BLOCK, decode, encode, pack_signs, unpack_signs


def test_a_byte_holds_eight_signs_lowest_bit_first() -> None:
    values = torch.tensor([1.0, -1, -1, 2, -3, -1, -1, 0.0])  # bits 0, 3 and 7
    assert pack_signs(values).tolist() == [0b10001001]


def test_every_byte_is_packed_and_unpacked_as_it_was() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_signs(unpack_signs(every)), every)


@pytest.mark.parametrize("blocks", [1, 3, 1000])
def test_signs_come_back_with_the_mean_of_their_block(blocks: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(blocks * BLOCK) * torch.logspace(-30, 20, blocks * BLOCK)
    encoded = encode(values)
    assert encoded.dtype == torch.uint8
    assert encoded.numel() == blocks * BYTES_PER_BLOCK
    back = decode(encoded)
    assert torch.equal(back >= 0, values >= 0)
    means = values.view(-1, BLOCK).abs().mean(dim=1)
    found = back.view(-1, BLOCK).abs()
    assert torch.allclose(found, means[:, None].expand_as(found), rtol=2**-8)


def test_zeros_stay_zeros() -> None:
    assert decode(encode(torch.zeros(BLOCK))).abs().max() == 0


def test_an_element_costs_a_bit_and_a_quarter() -> None:
    elements = 1000 * BLOCK
    assert encode(torch.randn(elements)).nbytes * 8 / elements == 1.25
