"""OpenAI-compatible HTTP server for one engine or a cluster, and adapters; extra ``serve`` (FastAPI, uvicorn).

    cli.py         command line of ``python -m punica.serve``, checked without torch; launch.py: engine and app.
    server.py      port, connections of clients that do not read, the end in steps.
    app.py         routes, every error in OpenAI's form (errors.py), limits of bodies, and an id on every answer.
    protocol.py    bodies of requests, and the engine's parameters from them, or a refusal.
    catalogue.py   base model and adapters by name; access.py: API keys, and folders where adapters may come from.
    responses.py   one generation call: admitted, tokenized, streamed or collected, cancelled.
    forms.py       shapes of answers and events, strings and log-probabilities of tokens.
    backend.py     an engine as the API sees it: orders to it, pieces of its answers, and metrics for Prometheus.
    watch.py       an engine's steps, for page.html and router_metrics.py (vLLM's names); demo.py: a tiny checkpoint.
    stepper.py     the engine's side: orders of all calls between two steps, one message after each.
    process.py     an engine in a process of its own.
    runners.py     a cluster of engines on Ray (`punica.cluster`), stepped by a thread.

Behaviour, options and limits: ``docs/deployment.md``.
"""
