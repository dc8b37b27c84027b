"""`punica.serve` beside the engine that it serves: both as processes of their own, with one command line.

    stream.py     chats as both get them.
    bench.py      checkpoint and adapters on disk, the processes, the check that both generate the same text.
    worker.py     the engine alone.
    process.py    start and end of a process.
"""
