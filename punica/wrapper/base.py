"""`PunicaWrapperBase`: the wrapper that every LoRA layer calls. It owns the metadata of a step."""

from punica.wrapper.contract.experts import ExpertContract
from punica.wrapper.contract.indices import StepIndices
from punica.wrapper.contract.linear import LinearContract
from punica.wrapper.contract.linear import PunicaWrapperABC as PunicaWrapperABC


class PunicaWrapperBase(StepIndices, LinearContract, ExpertContract):
    """A step (`StepMetadata`), the methods that layers call (`LinearMethods`, `ExpertMethods`) and the contract's.

    Constructed as `StepMetadata`. A backend sets ``_ops`` and ``_experts``; without them the methods that need them
    raise NotImplementedError, naming the class.
    """
