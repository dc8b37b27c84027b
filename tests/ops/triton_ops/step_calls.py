"""`TritonOps` for tests that hold the tensors of the weights; ``options`` as its argument."""

from punica.ops.triton_ops import TritonOps
from tests.ops.step_calls import StepCalls

_CALLS = StepCalls(TritonOps)
shrink, expand, linear = _CALLS.shrink, _CALLS.expand, _CALLS.linear
