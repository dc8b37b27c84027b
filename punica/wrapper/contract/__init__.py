"""The wrapper's vLLM-shaped methods, for callers who hold tensors and adapter ids instead of weights and steps.

    linear.py     `PunicaWrapperABC` and its methods on the dense layers
    experts.py    alignment and the products of experts, with long signatures
    indices.py    the step as index tensors
    keywords.py   the keywords of FP8 weights

Each method builds the objects (`punica.ops.weights`, `punica.ops.experts`) and calls the inner form in
`punica.wrapper.linear` and `punica.wrapper.experts`, which the library's own layers call directly.
"""
