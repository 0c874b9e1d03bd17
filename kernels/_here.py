"""What of this machine the kernels can use."""

import importlib.util


def lacking() -> str | None:
    """Why no kernel can run here, in one line; None where they can."""
    for package, name in (("torch", "PyTorch"), ("triton", "Triton")):
        if importlib.util.find_spec(package) is None:
            return f"{name} is not installed here: pip install {package}"
    from . import _triton

    if not _triton.available():
        return "Triton is installed here but cannot be imported"
    if _triton.INTERPRETED:
        return None
    import torch

    return None if torch.cuda.is_available() else "no GPU that PyTorch can use is here"


def name() -> str:
    """What kernels run on here; only where nothing is `lacking`."""
    import torch

    from ._device import architecture
    from ._triton import INTERPRETED

    if INTERPRETED:
        return "the CPU, under Triton's interpreter (TRITON_INTERPRET is set)"
    device = torch.device("cuda", torch.cuda.current_device())
    return f"{torch.cuda.get_device_name(device)} ({architecture(device)})"
