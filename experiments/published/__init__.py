"""The paper's request streams as files, so that another system can be held against the same requests. No torch.

    schema.py      what a line of requests and a line of answers has, as JSON Schema.
    requests.py    writes the streams, one file per popularity.
    score.py       throughput and waits from the times at which a system's tokens came out.
"""
