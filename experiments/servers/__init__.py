"""Engines and servers under the paper's popularities, for `ext_servers`.

systems.py     engines and their settings, their servers' command lines, and the interpreter that has each.
bench.py       checkpoint and adapters on disk, processes on them, and the check of their tokens.
worker.py      the process of an engine alone. Standard library at its top: vLLM's interpreter has vLLM alone.
stream.py      requests: their adapters and lengths.
client.py      OpenAI's API with adapters by model name: what a server has, streams, arrivals, requests in flight.
served.py      a server as an engine and under loads, and the rows of a load.
"""
