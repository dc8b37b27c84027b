"""Serving systems of Figures 11 and 12 and of requests that arrive by the clock.

    serving.py                       interface of a system; `built` makes one by name
    engine_systems.py loaded.py      systems on our engine; engines with few slots, or adapters in folders
    hf_systems.py hf_backend.py      Hugging Face with PEFT: static batches; model, adapters and decoding loop
    weights.py world.py              one backbone and one set of adapters for all systems; KV cache and reference
    stream.py timeline.py windows.py requests, replay of an admission rule, the steps that are timed
    check.py                         tokens and logits against Hugging Face
    bench.py whole_stream.py         windows timed; a whole stream beside what windows predict
    rank*.py                         the same on tensor-parallel ranks; bytes that a rank reads
    open_loop.py load_*.py steady.py arrivals by the clock, capacity, their readings

`experiments.facts.systems` has one entry for each system: its class, admission rule, name and looks.
"""
