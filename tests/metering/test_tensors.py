"""Finding the plain tensors in arguments, results and state."""

import pytest
import torch

from memlab.metering.tensors import plain_tensors, tensors_among, tensors_within

A, B, C = torch.zeros(1), torch.zeros(2), torch.zeros(3)


def test_tensors_are_found_in_arguments_and_in_lists_of_them():
    found = tensors_among((A, 3, [B, None, C], "x"))
    assert [id(tensor) for tensor in found] == [id(A), id(B), id(C)]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_tensor_is_its_indices_and_its_values():
    dense = torch.eye(3)
    for sparse, parts in ((dense.to_sparse(), 2), (dense.to_sparse_csr(), 3)):
        found = tensors_among((sparse,))
        assert len(found) == parts
        assert all(tensor.layout is torch.strided for tensor in found)


def test_an_opaque_tensor_has_no_plain_parts():
    assert tensors_among((torch.zeros(2, 2).to_mkldnn(),)) == []


def test_nested_state_is_searched():
    found = list(tensors_within({"step": A, "groups": [{"m": B}, (C, 1.5)]}))
    assert [id(tensor) for tensor in found] == [id(A), id(B), id(C)]


def test_a_wrapper_subclass_is_replaced_by_its_inner_tensors():
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(5)], layout=torch.jagged)
    sizes = sorted(tensor.numel() for tensor in plain_tensors(nested))
    assert sizes[-1] == 7
