"""Serving on one GPU (or one tensor-parallel group): continuous batches over many adapters.

Modules in the order of a request's path; admission and preemption are policies of :mod:`punica.scheduling`.

    config.py:        sizes of batch and cache, their checks against the model, and the memory that they take
    pretrained.py:    parts of an engine for a checkpoint folder, in sizes that fit
    generation.py:    prompts in, results out: ``generate`` and ``stream``, by several threads in turns
    prompts.py:       forms of prompts, chat templates of adapter folders; text.py: text to token ids and back
    engine.py:        the loop: ``add_request`` queues, every ``step`` schedules, runs, delivers and retires
    requests.py:      checks on arrival, results of requests, outputs of steps
    residency.py:     adapters on demand: loaded and activated at admission, or one step ahead
    overlap.py:       the next step, staged and launched while the device computes the current one
    runner.py:        stages and launches a step: one model invocation, one token per request
    cuda_graph.py:    steps captured for padded sizes, then replayed
    attention.py:     the paged cache of keys and values, and attention over it in plain torch and by GPU kernels
    sampler.py:       tokens from logits, adjusted by a request's parameters and tokens
    compile_ahead.py: a command that compiles an engine's kernels beforehand, for a GPU that is described
"""

from punica.engine.config import EngineConfig
from punica.engine.engine import Engine
from punica.engine.requests import GenerationChunk, GenerationResult, StepOutput, StepStatistics
from punica.scheduling import (
    ADMISSION_RULES,
    Mixture,
    Request,
    RequestState,
    RequestStatus,
    SamplingParams,
    adapters_of,
    as_sampling_params,
)
