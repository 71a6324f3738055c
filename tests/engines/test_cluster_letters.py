"""What the driver of a cluster sends: letters of few arguments, and tensors as their bytes."""

import pytest
import torch

from equipoise.engines.cluster.packing import Letter, joined, opened, pack_numbers
from equipoise.engines.cluster.ray_extra import INLINE_VARIABLE
from equipoise.types import Cohort

REFERENCE = ("in Ray's object store",)  # an argument that is no byte string stays one


def as_bytes(parts):
    return [bytes(part) if isinstance(part, memoryview) else part for part in parts]


@pytest.mark.parametrize("limit", [300, 1_200_000])
@pytest.mark.parametrize("models", [[], [b"m" * 64], [REFERENCE], [b"m" * 200, b"n" * 13], [REFERENCE, b""]])
@pytest.mark.parametrize("own", [[b"o"], [REFERENCE], [b"p" * 100, b"q" * 230, b""], [b"r" * 1000]])
def test_a_letter_is_read_as_it_was_written(monkeypatch, limit, models, own):
    monkeypatch.setenv(INLINE_VARIABLE, str(limit))
    letter = Letter(3, [b"h" * 70], models, own)
    read = Letter.read(tuple(letter.arguments()))
    assert read.answer_parts == 3
    assert [as_bytes(parts) for parts in read[1:]] == list(letter[1:])


def test_parts_that_travel_with_a_call_are_one_argument_each_of_them_aligned(monkeypatch):
    monkeypatch.setenv(INLINE_VARIABLE, "1200000")
    (whole,) = Letter(1, [b"h" * 70], [b"m" * 100], [b"o" * 10]).arguments()
    assert [whole.index(letter) % 64 for letter in (b"h", b"m", b"o")] == [0, 0, 0]
    monkeypatch.setenv(INLINE_VARIABLE, "300")  # of which nine tenths are used
    assert [len(each) for each in Letter(1, [b"h" * 70], [b"m" * 200], [b"o" * 10]).arguments()] == [64 + 70, 200, 10]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.0),
        torch.arange(6).view(2, 3).t(),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.randn(5).bfloat16(),
        torch.randn(3, requires_grad=True),
    ],
)
def test_tensors_arrive_as_they_were(value):
    cohort = Cohort(1, 2, torch.arange(3), value, value)
    read = opened([joined(pack_numbers([cohort, (value, None)]))])
    for found in (read[0].weights, read[1][0]):
        assert torch.equal(found, value)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
