"""Conditions under which a process must not be forked into roles."""

import os

import torch

from pipeline.runtime.forkserver_process import _forks_badly


def test_a_process_whose_forks_cannot_use_cuda_is_found_by_a_fork(monkeypatch):
    parent = os.getpid()
    # PyTorch's own answer: False in the process that asked CUDA for its devices, True in its forks.
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != parent)

    assert _forks_badly()


def test_a_process_that_has_not_asked_cuda_may_be_forked():
    assert not _forks_badly()
