"""Load over HTTP for any server that has OpenAI's API and serves adapters by model name. No torch.

    about.py       name and version of a server, its base model and its adapters.
    protocol.py    address, key and streams of OpenAI's API.
    client.py      one streamed completion, and the kind of its error.
    fields.py      fields of completions that fix the number of tokens, as far as a server takes them.
    loops.py       arrivals by the clock, requests in flight, lag of the client's own event loop.
    readings.py    rows of a run.
"""
