"""Bundled Triton kernels. Installed as `advisor.kernels`; knows nothing of the rest of the package."""
