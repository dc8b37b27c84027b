"""Reliability trials: load, faults, bad input, isolation and determinism, each in a process of its own.

    trial.py, groups.py         A trial with its counts; all trials by name.
    process.py, rows.py         One trial in a process with a time limit; its outcome as rows.
    world.py, server.py         Checkpoint, adapters and undisturbed tokens; a server in a process.
    use.py, writer.py           Memory, threads and handles; a process that writes rows.
    load.py, server_load.py     Soaks of the engine and of the server.
    faults.py, full_disk.py     Damaged files, lack of memory and of room, interrupts.
    killed.py                   Killed writers and ranks, signalled servers, a clock that jumps.
    killed_runner.py            Killed Ray runners.
    input.py, api.py            Random folders and calls of operators and of the API, drawn by Hypothesis.
    isolation.py                Neighbours, evicted adapters, API keys.
    determinism.py              Processes, orders, simulations; on a GPU graphs and batch sizes.
    kernels.py, kernel_calls.py Every Triton kernel, watched by compute-sanitizer.
"""
