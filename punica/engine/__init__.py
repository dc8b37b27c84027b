"""Serving on one GPU (or one tensor-parallel group): continuous batches over many adapters.

The way of a request; what it may join, and when, is decided in :mod:`punica.scheduling`.

    pretrained.py       an engine for a checkpoint folder: what the folder says (folder.py), what fits (sizes.py)
    generation.py       prompts in, results out: ``generate`` and ``stream``; text.py between text and token ids
    engine.py           ``add_request`` checks and queues it; every ``step`` schedules, runs, delivers and retires
    arrival.py          what is refused, before anything changes
    config.py           how large batch and cache are
    residency.py        its adapter: checked on arrival, loaded and made active when it is admitted, or one step ahead
    runner.py           the step's rows through the model, one token for each request; the next step sent meanwhile
    buffers.py          token ids, positions, cache rows and sampled rows, in tensors that every step refills
    cuda_graph.py       on a GPU: steps captured once for padded sizes, then replayed
    attention.py        each request attends to its own blocks in
    kernel_attention.py the same on a GPU, varlen.py: the library's part of it
    kv_cache.py         the keys and values of all layers
    sampler.py          the token of each row of logits
    output.py           what a step gives back, results.py: what a request gives back
"""

from punica.engine.config import EngineConfig
from punica.engine.engine import Engine
from punica.engine.outputs import GenerationChunk, GenerationResult, StepOutput, StepStatistics
from punica.scheduling import ADMISSION_RULES, Request, RequestState, RequestStatus, SamplingParams
