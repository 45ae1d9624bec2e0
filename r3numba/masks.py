"""The router padding mask of a batch that the trainer laid out itself."""

from __future__ import annotations

import importlib
from typing import Any

from ._checks import integer_vector, is_tensor, kind, not_negative


def router_padding_mask(attention_mask: Any, captured_lengths: Any) -> Any:
    """Return which rows of a padded batch carry no captured route.

    Parameters
    ----------
    attention_mask : tensor ``[batch, length]``, bool or integers of 0 and 1, any device
        True or 1 = a token; padding on any side, holes included.
    captured_lengths : integers ``[batch]``
        How many tokens of each trajectory, from its first one, came with a route.

    Returns
    -------
    tensor ``[batch, length]``, bool, on the mask's device
        True = padding or uncaptured (the polarity of Megatron-core's code; some of its docstrings say the opposite).

    Raises
    ------
    TypeError
        For a mask that is no tensor or holds floats, or lengths that are no integers.
    ValueError
        For a wrong shape, mask values other than 0 and 1, or more captured rows than tokens (naming the trajectory).

    Notes
    -----
    Thread-safe; nothing of the input is shared with the result. Checking the values waits for the device once.

    Examples
    --------
    >>> import torch
    >>> mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    >>> router_padding_mask(mask, [2, 4]).int().tolist()
    [[1, 0, 0, 1], [0, 0, 0, 0]]
    """
    if not is_tensor(attention_mask):
        raise TypeError(f"attention_mask is a {kind(attention_mask)}, need a tensor")
    torch = importlib.import_module("torch")
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise TypeError(f"attention_mask has dtype {attention_mask.dtype}, need bool or integers")
    if attention_mask.layout != torch.strided:
        raise TypeError(f"attention_mask has layout {attention_mask.layout}, need a strided tensor")
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask has {attention_mask.dim()} dimensions, need 2: [batch, length]")
    lengths = captured_lengths.cpu() if is_tensor(captured_lengths) else captured_lengths
    counts = integer_vector("captured_lengths", lengths, len(attention_mask))
    not_negative("captured_lengths", counts)
    token = attention_mask != 0
    if bool((attention_mask != token).any()):
        raise ValueError("attention_mask has values other than 0 and 1")
    position = token.cumsum(dim=1)  # 1 at a trajectory's first token
    captured = torch.from_numpy(counts).to(attention_mask.device)[:, None]
    tokens = position[:, -1:] if attention_mask.shape[1] else torch.zeros_like(captured)
    if bool((captured > tokens).any()):
        index = int((captured > tokens).int().argmax())
        raise ValueError(
            f"captured_lengths[{index}] is {int(counts[index])}, need at most {int(tokens[index])}, its tokens"
        )
    return ~token | (position > captured)
