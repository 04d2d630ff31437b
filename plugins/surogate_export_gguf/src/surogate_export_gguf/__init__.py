"""GGUF for Surogate: finished models as files that llama.cpp loads."""
