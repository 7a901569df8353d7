"""A local Hugging Face Hub with repositories, jobs and a dataset viewer."""
