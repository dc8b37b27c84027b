"""Conformance test of multi-LoRA servers behind OpenAI's API: every tenant must get its own adapter's tokens.

    weights.py         tiny Llama and adapters in PEFT's form, on disk
    oracle.py          right greedy tokens: PEFT merges the adapters in float32
    expected.py        those that no 16-bit rounding could turn, as a file
    servers.py         command lines that start a server on the folder
    client.py          client of a server
    cases.py           the cases
    verdict.py         owners of tokens that came to the wrong tenant

The command is `experiments.commands.conformance`.
"""
