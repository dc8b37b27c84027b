"""OpenAI-compatible HTTP server for one engine and its adapters; optional extra ``serve`` (FastAPI, uvicorn).

    cli.py             command line of ``python -m punica.serve``
    app.py             routes, and every error in OpenAI's form (errors.py)
    protocol.py        bodies of requests; sampling.py: the engine's parameters from them, or a refusal
    catalogue.py       base model and adapters by name, API keys; folders.py: folders that adapters may come from
    responses.py       one generation call: admitted (backpressure.py), tokenized, streamed or collected, cancelled
    forms.py           shapes of answers; text.py: text and log-probabilities of one choice
    engine_thread.py   the thread that owns the engine and makes its steps
    metrics.py         Prometheus metrics
"""
