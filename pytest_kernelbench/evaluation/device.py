"""What judge and worker do alike to be ready to compute, so that both sides compute under the same rules."""

from __future__ import annotations

import torch


def start_device(name: str, threads: int, tf32: bool | None) -> torch.device:
    """Make a child ready to compute: device, threads, precision, no gradients. Judge and worker alike."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    if name == "cuda":
        if tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        return device
    return torch.device("cpu")


def seed_all(seed: int) -> None:
    """The same state of every generator, so that random operations agree between reference and candidate."""
    torch.manual_seed(seed)
