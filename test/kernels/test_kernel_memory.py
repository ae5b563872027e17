"""One allocation for many tensors."""

from __future__ import annotations

import torch

from qwen_vl_ros.kernels.memory import ALIGNED, together


def test_tensors_of_any_kind_lie_in_one_allocation_and_are_the_same():
    parts = [torch.randn(3, 5), torch.arange(7, dtype=torch.int16), torch.empty(0, 4),
             torch.randint(0, 255, (300, 2), dtype=torch.uint8), torch.randn(2, 2).half().T]
    laid = together(parts, torch.device('cpu'))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(parts, laid))
    rooms = {part.untyped_storage().data_ptr() for part in laid}
    assert len(rooms) == 1 and rooms.isdisjoint(p.untyped_storage().data_ptr() for p in parts)
    assert all(p.is_contiguous() and p.storage_offset() * p.element_size() % ALIGNED == 0
               for p in laid)


def test_nothing_is_nothing():
    assert together([], torch.device('cpu')) == []
