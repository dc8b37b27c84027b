"""Punica: one backbone, many LoRA adapters, one batch.

The library of the paper "Punica: Multi-Tenant LoRA Serving" (Chen et al., MLSys 2024, arXiv 2310.18547). Everything
public is imported from its package: ``from punica.wrapper import PunicaWrapperCPU``.
"""

__version__ = "1.1.0"
