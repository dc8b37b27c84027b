"""Conformance test of multi-LoRA servers behind OpenAI's API: every tenant must get its own adapter's tokens."""
