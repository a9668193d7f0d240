"""Models whose weights show what a swapped row or a forgotten norm does."""

import torch
from transformers import AutoModelForCausalLM


def load_uneven(folder, **options):
    """The model with uneven weights everywhere: a norm that multiplies by 1 would commute with a rotation."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter)).add_(0.1 * torch.randn_like(parameter))
    return model
