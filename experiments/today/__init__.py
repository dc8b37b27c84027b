"""Engines that users would pick today, and ours: each in a process and an interpreter of its own, for `ext_today`.

`peers.py` has the settings of each engine and its interpreter, `folders.py` the checkpoint and the adapters on disk.
`bench.py` writes jobs, runs a process for each, and checks its tokens. In that process a worker puts its engine behind
the interface of `measure.py`, which takes the times. `measure.py` and `worker_vllm.py` import nothing else
of this repository: the interpreter of vLLM needs vLLM alone.
"""
