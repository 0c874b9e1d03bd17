"""Speed of the kernels beside eager PyTorch, torch.compile and Liger.

A family's sizes stand in the module of its name here: `cases(quick: bool) -> Iterator[Case]`. Nothing lists
them. `timing` holds the clock, `run` goes through families and sets times against the measured roofs.
"""
