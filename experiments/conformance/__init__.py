"""Conformance test of multi-LoRA servers behind OpenAI's API: every tenant must get its own adapter's tokens.

`weights.py` writes a tiny Llama and adapters in PEFT's form. `oracle.py` computes the right greedy tokens: PEFT merges
the adapters in float32. `expected.py` keeps those that no 16-bit rounding could turn, as a file. `servers.py` prints
the lines that start a server on the folder. `client.py` asks it, `cases.py` has the cases. `verdict.py` names the owner
of tokens that came to the wrong tenant, and counts faults of the protocol apart. The command is
`experiments.commands.conformance`.

vLLM 0.26.0 serves HTTP where these are beside its own needs: uvicorn, uvloop, watchfiles, prometheus_client,
prometheus-fastapi-instrumentator, and model-hosting-container-standards with jmespath and supervisor.
"""
