"""State of an engine amid a stream: running requests whose keys and values are noise."""

import torch

from punica.engine import Engine, Request
from punica.scheduling import RequestState, RequestStatus


def put(engine: Engine, request: Request, generated: int) -> None:
    """Add a running request with `generated` tokens; with all its new tokens it is an idle member of a fixed batch."""
    if generated == request.max_new_tokens:
        state = RequestState(request)
        state.status, state.finish_reason = RequestStatus.FINISHED, "length"
    else:
        state = engine.add_request(request)
        engine.scheduler.waiting.remove(state)
        state.status = RequestStatus.RUNNING
    state.output_token_ids += [(7 * place + 1) % engine.vocab_size for place in range(generated)]
    whole = engine.scheduler.rule.inseparable
    engine.blocks.reserve(request.request_id, request.final_kv_length if whole else state.num_tokens)
    engine.scheduler.running.append(state)


def clear(engine: Engine) -> None:
    """End all requests, waiting and running, and wait for the device."""
    scheduler = engine.scheduler
    for state in [*scheduler.running, *scheduler.waiting]:
        if not state.has_ended:
            engine.abort_request(state.request_id)
    for state in list(scheduler.running):
        if state in scheduler.running:  # the members of an inseparable batch leave together
            scheduler.remove(state)
    engine.forget_next()
    if engine.runner.model.lm_head.weight.is_cuda:
        torch.cuda.synchronize()  # a step that it had begun is not to be part of what is timed next
