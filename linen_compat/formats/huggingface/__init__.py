"""Hugging Face's models of this kind: folders of safetensors and their `config.json`."""
