"""torch.multiprocessing's queue again; tensors arrive as file descriptors, its default."""

from benches.ways import torch_queue


class Way(torch_queue.Way):
    """The consumer."""

    strategy = "file_descriptor"
