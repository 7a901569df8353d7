"""Access the Hugging Face Hub: look up repos and their content, and suggest similar ids."""
