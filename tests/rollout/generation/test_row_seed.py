"""The seeds of rows, as both the engines and torch read them."""

import pytest
import torch

from pipeline.rollout.generation.interface import row_seed


def test_no_two_rows_of_neighbouring_tickets_share_a_seed():
    """With seed + row, row 1 of ticket 7 would be row 0 of ticket 8."""
    seeds = [row_seed(ticket, row) for ticket in range(7, 71) for row in range(512)]

    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_upper_bits_of_a_seed_are_those_of_splitmix64():
    # The generator's first output from state 0 and, from state 1234567, its first two (reference implementation).
    assert row_seed(0, 0) >> 32 == 0xE220A8397B1DCDAF >> 33
    assert [row_seed(1234567, row) >> 32 for row in range(2)] == [6457827717110365317 >> 33, 3203168211198807973 >> 33]


@pytest.mark.parametrize("ticket", [0, 1, 71, 2**40 + 7, 2**63 - 1])
def test_no_two_rows_of_a_ticket_share_the_32_bits_that_torch_reads_on_a_cpu(ticket):
    # Random bits would differ in this many rows with a probability of 0.31 a ticket.
    assert len({row_seed(ticket, row) & 0xFFFFFFFF for row in range(100_000)}) == 100_000


def test_no_two_rows_of_a_ticket_share_a_stream_of_torch():
    # SplitMix64 alone gives the first two the same lower 32 bits, 0x9C801DD6.
    rows = [3461, 3869, *range(2000)]
    draws = torch.Generator()

    streams = {tuple(torch.rand(4, generator=draws.manual_seed(row_seed(71, row))).tolist()) for row in rows}

    assert len(streams) == len(rows)


def test_the_32_bits_that_torch_reads_depend_on_every_bit_of_the_tickets_seed():
    assert len({row_seed(7 ^ (1 << bit), 3) & 0xFFFFFFFF for bit in range(64)}) == 64
