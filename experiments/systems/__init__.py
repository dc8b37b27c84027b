"""Serving systems of Figures 11 and 12 and of requests that arrive by the clock.

    serving.py check.py              interface of a system, `built` by name, and what all share: KV cache, reference;
                                     its tokens and logits against Hugging Face
    engine_systems.py loaded.py      systems on our engine; the same loaded by the clock, and their capacity
    hf_systems.py hugging_face.py    static batches with PEFT; Hugging Face's model, adapters and decoding loop
    weights.py                       one backbone and one set of adapters for all systems
    stream.py windows.py             requests, replay of an admission rule; the steps that are timed
    bench.py ranks.py                windows timed, and whole streams; the same on tensor-parallel ranks
    open_loop.py                     requests that arrive by the clock, and their readings

`experiments.facts.systems` has one entry for each system: its class, admission rule, name and looks.
"""
