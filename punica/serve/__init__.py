"""OpenAI-compatible HTTP server for one engine or a cluster, and adapters; extra ``serve`` (FastAPI, uvicorn).

    cli.py         command line of ``python -m punica.serve``, checked without torch; launch.py: engine and app.
    server.py      port, connections of clients that do not read, the end in steps.
    app.py         routes, every error in OpenAI's form (errors.py), and an id on every answer.
    protocol.py    bodies of requests; sampling.py: the engine's parameters from them, or a refusal.
    catalogue.py   base model and adapters by name; access.py: API keys, and folders where adapters may come from.
    responses.py   one generation call: admitted (limits.py), tokenized, streamed or collected, cancelled.
    forms.py       shapes of answers and events, strings and log-probabilities of tokens.
    backend.py     an engine as the API sees it: orders to it, and pieces of its answers; metrics.py: Prometheus.
    stepper.py     the engine's side: orders of all calls between two steps, one message after each.
    process.py     an engine in a process of its own.
    runners.py     a cluster of engines on Ray (`punica.cluster`), stepped by a thread.

Parameters that a request leaves out are the checkpoint's defaults: greedy unless its `generation_config.json` samples.
A client that leaves is aborted, and its memory is free after the step.

* Adapters load and unload by `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` (fields as vLLM names them), from
  folders below `--allow-folder DIR` alone, links resolved; without it, none. `load_inplace` replaces one, and requests
  that have begun keep the old version. Write access to allowed folders is trusted.
* `--api-key` opens the base model, adapters without a key of their own, and loading; `--adapter-key sql=KEY` closes
  `sql` to all others. A file of arguments, one per line, keeps keys out of the process list: `@arguments.txt`.
* `--max-queue` limits waiting generations (429 with `Retry-After`), `--max-body` bytes (413), `--max-model-len` tokens
  of prompt and answer. A client that does not read its answer for 60 s is aborted.
* SIGTERM turns `/health` and new requests to 503 for `--drain` seconds, and lets answers run for `--grace` more.
* `/health` is 503 after a failed step; `/metrics` is without names of tenants. Both are open, and so is `/version`.
* `--ray N` (extra ``cluster``) serves on N engines, placed by the paper's scheduler. Requests of one that dies continue
  on others, `/health` says `degraded` until it is replaced. A request fails if three die with it alone.
* No TLS, no rate limit per client, no time limit for slow uploads: a proxy's work.
"""
