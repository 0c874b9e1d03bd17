"""Whether the kernels are right on this device: beside float64, by eager PyTorch's own error.

A family's checks stand in the module of its name here: `probes() -> Iterator[Probe]`. Nothing lists them.
`judge` holds the rule, `run` goes through families.
"""
