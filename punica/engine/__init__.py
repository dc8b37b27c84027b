"""Serving on one GPU (or one tensor-parallel group): continuous batches over many adapters.

Modules in the order of a request's path; admission and preemption are policies of :mod:`punica.scheduling`.

    config.py:        sizes of batch and cache, and their checks against the model
    pretrained.py:    parts of an engine for a checkpoint folder; sizes.py: sizes that fit the memory
    generation.py:    prompts in, results out: ``generate`` and ``stream``; text.py: text to token ids and back
    prompts.py:       forms of prompts; adapter_text.py: chat templates of adapter folders
    turns.py:         threads that share an engine, one in it at a time
    engine.py:        the loop: ``add_request`` queues, every ``step`` schedules, runs, delivers and retires
    intake.py:        checks on arrival, and the states of accepted requests
    residency.py:     adapters on demand: loaded and activated at admission, or one step ahead
    overlap.py:       the next step, staged and launched while the device computes the current one
    runner.py:        stages and launches a step: one model invocation, one token per request
    step_inputs.py:   token ids, positions, cache rows and sampled rows, refilled in place by every step
    cuda_graph.py:    steps captured for padded sizes, then replayed
    attention.py:     attention over the paged cache in plain torch; gpu_attention.py: the same by GPU kernels
    kv_cache.py:      keys and values of all layers
    sampler.py:       tokens from logits; penalties.py: logits adjusted by a request's parameters and tokens
    outputs.py:       results of requests, outputs and statistics of steps
    compile_ahead.py: a command that compiles an engine's kernels beforehand; absent_gpu.py: on a GPU that is described
"""

from punica.engine.config import EngineConfig
from punica.engine.engine import Engine
from punica.engine.outputs import GenerationChunk, GenerationResult, StepOutput, StepStatistics
from punica.scheduling import (
    ADMISSION_RULES,
    Request,
    RequestState,
    RequestStatus,
    SamplingParams,
    as_sampling_params,
)
