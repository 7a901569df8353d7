"""The Hugging Face Hub: what exists, what is in it, and what was probably meant."""
