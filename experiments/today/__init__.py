"""Engines that users would pick today, and ours: each in a process and an interpreter of its own, for `ext_today`.

    peers.py           settings of each engine, and the interpreter that has it
    folders.py         checkpoint and adapters on disk, which all engines read
    measure.py         decode steps, a stream, registration and tokens of an engine, for a job in JSON
    worker_punica.py   our engine behind that interface
    worker_vllm.py     vLLM behind that interface
    bench.py           jobs, the processes that do them, and checks of their tokens

`measure.py` and the workers run under the other interpreter, too: they import its engine and the standard library.
"""
