"""The targets of tensors in a model's parameters, learned from a loader such as vLLM's."""

import pytest
import torch

from pipeline.rollout.generation.vllm.targets import fills, watched


class Fused(torch.nn.Module):
    """A fused parameter of two tensors, an embedding padded to more rows, and a vector."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.full((5, 3), 9.0))
        self.embedding = torch.nn.Parameter(torch.full((6, 3), 9.0))
        self.norm = torch.nn.Parameter(torch.full((3,), 9.0))

    def load(self, tensors):
        for name, tensor in tensors:
            if name == "q":
                self.qkv.data.narrow(0, 0, 2).copy_(tensor)
            elif name == "k":
                self.qkv.data[2:5].copy_(tensor)
            elif name == "embedding":
                self.embedding.data[:4].copy_(tensor)
                self.embedding.data[4:].fill_(0)
            elif name == "norm":
                self.load_norm(tensor)

    def load_norm(self, tensor):
        self.norm.data.copy_(tensor)


def tensors(first=0.0):
    shapes = {"q": (2, 3), "k": (3, 3), "embedding": (4, 3), "norm": (3,), "unused": (2,)}
    return {name: first + number + torch.rand(shape) for number, (name, shape) in enumerate(shapes.items())}


def targets_in(model, load=None):
    with torch.no_grad():
        return watched(load or model.load, tensors(), model.parameters())


def test_a_copy_to_the_targets_does_what_the_loader_does():
    torch.manual_seed(0)
    model, by_loader = Fused(), Fused()
    targets = targets_in(model)
    others = tensors(first=10.0)

    for name, target in targets.items():
        target.copy_(others[name])

    by_loader.load(others.items())
    assert targets.keys() == {"q", "k", "embedding", "norm"}
    assert {name: target.shape for name, target in targets.items()} == {name: others[name].shape for name in targets}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, by_loader.get_parameter(name)), name


class Computes(Fused):
    def load_norm(self, tensor):
        self.norm.data.copy_(tensor)
        self.norm.data.add_(1)


class Converts(Fused):
    def load_norm(self, tensor):
        self.norm.data.copy_(tensor * 2)


class Cuts(Fused):
    def load_norm(self, tensor):
        self.norm.data[:2].copy_(tensor[:2])
        self.norm.data[2:].copy_(tensor[2:])


class Twice(Fused):
    def load_norm(self, tensor):
        self.norm.data.fill_(0)
        self.norm.data.copy_(tensor)


class LeavesOut(Fused):
    def load_norm(self, tensor):
        pass


class ThroughAnother(Fused):
    """The write is an argument of a list."""

    def load_norm(self, tensor):
        torch._foreach_copy_([self.norm.data], [tensor])


@pytest.mark.parametrize("model", [Computes, Converts, Cuts, Twice, LeavesOut, ThroughAnother])
def test_a_loader_that_does_more_than_copy_each_tensor_to_one_place_is_found(model):
    assert targets_in(model()) is None


@pytest.mark.parametrize(("rows", "columns", "rank_axis"), [(3, 6, 0), (6, 3, 1)], ids=["A", "B"])
def test_a_place_holds_an_adapters_matrix_of_its_size_with_more_room_in_the_rank_alone(rows, columns, rank_axis):
    target = torch.zeros(8, 6) if rank_axis == 0 else torch.zeros(6, 8)
    matrix = torch.rand(rows, columns)
    target[:rows, :columns] = matrix

    assert fills(matrix, target, rank_axis)
    assert not fills(matrix[:, :-1], target, 0) and not fills(matrix[:-1], target, 1), "of a smaller layer"
    assert not fills(torch.rand(9, 6) if rank_axis == 0 else torch.rand(6, 9), target, rank_axis), "of a larger rank"
    target[0, 0] += 1
    assert not fills(matrix, target, rank_axis)
