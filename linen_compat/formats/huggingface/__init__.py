"""Hugging Face's Mixtral and Llama: folders of safetensors and their `config.json`."""
